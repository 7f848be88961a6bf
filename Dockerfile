# The server's image: docker build -t moaserve . && docker run -p 127.0.0.1:8000:8000 moaserve
#
# PYTHON_IMAGE   what it is built on; Debian with Python 3.11 or newer
# DEVICE         cpu, or cuda: torch with CUDA's libraries, 5 GB more
# TORCH_INDEX    a package index to take torch from, e.g. https://download.pytorch.org/whl/cu128
# EXTRAS         what else is installed, by commas: otel (traces), ray (moaserve ray, which is 300 MB)
# WITH_COMPILER  1: g++, for small models that have to be compiled for the CPU; operators are in the image (docs/self-hosting.md)
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=
ARG EXTRAS=otel
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# pip up to 25.2 reads the first of the two where it builds packages, and newer ones the second.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# As in the Makefile: on a CPU torch comes from its CPU index, which saves gigabytes, or from the default one where that cannot be
# reached.
RUN set -eu; \
    case "$DEVICE" in cpu | cuda) ;; *) echo "DEVICE must be cpu or cuda, not '$DEVICE'" >&2; exit 1 ;; esac; \
    python -m venv --without-pip /opt/venv; \
    in_venv() { pip --python /opt/venv/bin/python "$@"; }; \
    torch=$(grep '^torch==' constraints.txt); \
    if [ -n "$TORCH_INDEX" ]; then \
        in_venv install --no-deps --index-url "$TORCH_INDEX" "$torch"; \
    elif [ "$DEVICE" = cpu ]; then \
        in_venv install --no-deps --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "$torch" \
            || echo 'CPU index not reachable: taking torch from the default index'; \
    fi; \
    python -c "import tomllib; import os; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [name for name in os.environ['EXTRAS'].split(',') if name]; \
print(*project['dependencies'], *(each for name in extras for each in project['optional-dependencies'][name]), sep='\n')" >requirements.txt; \
    in_venv install --requirement requirements.txt
# For the operators of x86 CPUs; the image itself has no compiler.
RUN set -eu; \
    if [ "$(uname -m)" = x86_64 ]; then \
        apt-get update; \
        apt-get install --yes --no-install-recommends g++ libc6-dev; \
        rm -rf /var/lib/apt/lists/*; \
    fi
# Apart from its dependencies, so that a new version of ours is a small layer. Operators are built from where it is installed: Python
# would take the sources of the folder that it runs in for the program.
COPY . .
RUN set -eu; \
    pip --python /opt/venv/bin/python install --no-deps --target /opt/moaserve .; \
    if [ "$(uname -m)" = x86_64 ]; then cd /opt/moaserve; /opt/venv/bin/python -m models.prebuilding; fi

FROM ${PYTHON_IMAGE}
ARG WITH_COMPILER=0
RUN set -eu; \
    if [ "$WITH_COMPILER" = 1 ]; then \
        apt-get update; \
        apt-get install --yes --no-install-recommends g++ libc6-dev; \
        rm -rf /var/lib/apt/lists/*; \
    fi; \
    useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin moaserve; \
    install -d -o moaserve -g moaserve /cache /models
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/moaserve /opt/moaserve
COPY deploy/docker/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/moaserve/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/moaserve \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    MOASERVE_HOST=0.0.0.0
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="MoA Serve" \
      org.opencontainers.image.description="OpenAI-compatible LLM server with lossless speculative decoding by Mixture-of-Attentions drafters" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
WORKDIR /opt/moaserve
USER 10001:10001
# Models of yours, and what is downloaded or compiled.
VOLUME ["/models", "/cache"]
EXPOSE 8000
# Large models take minutes to load, and so does compiling; failures in that time count for nothing, and the first success ends it.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 CMD ["python", "/opt/healthcheck.py"]
ENTRYPOINT ["moaserve", "serve"]
