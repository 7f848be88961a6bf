// Registers the class of tree_layout.h.

#include "tree_layout.h"

template <class Number>
void add_layout(torch::Library& library, const char* name) {
  library.class_<moaserve::TreeLayout<Number>>(name).def(torch::init<int64_t, int64_t, int64_t>()).def("run", &moaserve::TreeLayout<Number>::run);
}

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  add_layout<at::BFloat16>(library, "TreeLayout_bfloat16");
  add_layout<float>(library, "TreeLayout_float32");
}
