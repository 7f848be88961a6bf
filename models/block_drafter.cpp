// Registers the class of block_drafter.h.

#include "block_drafter.h"

template <class Number>
void add_block_drafter(torch::Library& library, const char* name) {
  library.class_<moaserve::BlockDrafter<Number>>(name)
      .def(torch::init<std::vector<at::Tensor>, int64_t, int64_t, double>())
      .def("draft", &moaserve::BlockDrafter<Number>::draft);
}

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  add_block_drafter<at::BFloat16>(library, "BlockDrafter_bfloat16");
  add_block_drafter<float>(library, "BlockDrafter_float32");
}
