"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter

from app.answering import check_model
from app.deps import Serving, ServingDep
from app.responses import Model, ModelList, refusals

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", responses=refusals(401, 403, 429, 503))
async def list_models(serving: ServingDep) -> ModelList:
    """The one model that is served, by each of its names."""
    return ModelList(object="list", data=[_model(serving, name) for name in serving.model_names()])


@router.get("/{model_id:path}", responses=refusals(401, 403, 404, 429, 503))
async def retrieve_model(model_id: str, serving: ServingDep) -> Model:
    """A model by name; names of hub models contain a slash."""
    check_model(serving, model_id)
    return _model(serving, model_id)


def _model(serving: Serving, name: str) -> Model:
    info = serving.model_info()
    return Model(id=name, object="model", created=info.created, owned_by="moaserve", max_model_len=info.max_model_len)
