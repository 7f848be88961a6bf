// Registers the class of tiled_head.h.

#include "tiled_head.h"

template <class Number>
void add_head(torch::Library& library, const char* name) {
  library.class_<moaserve::Head<Number>>(name).def(torch::init<at::Tensor>()).def("run", &moaserve::Head<Number>::run);
}

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  add_head<at::BFloat16>(library, "Head_bfloat16");
  add_head<float>(library, "Head_float32");
}
