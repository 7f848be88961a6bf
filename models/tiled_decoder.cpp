// Registers the class of tiled_decoder.h.

#include "tiled_decoder.h"

template <class Number>
void add_decoder(torch::Library& library, const char* name) {
  library.class_<moaserve::Decoder<Number>>(name)
      .def(torch::init<std::vector<at::Tensor>, int64_t, int64_t, double>())
      .def("run", &moaserve::Decoder<Number>::run)
      .def("finish", &moaserve::Decoder<Number>::finish);
}

TORCH_LIBRARY_FRAGMENT(moaserve, library) {
  add_decoder<at::BFloat16>(library, "Decoder_bfloat16");
  add_decoder<float>(library, "Decoder_float32");
}
