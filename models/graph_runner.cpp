// Runs compiled graphs without the interpreter's lock: PyTorch lets go of it around methods of such classes, but not around
// AOTIModelPackageLoader's own binding, where every other thread waits while a prompt is read.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

namespace {

struct Graph : torch::CustomClassHolder {
  explicit Graph(const std::string& package) : loader(package) {}

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) {
    return loader.boxed_run(std::move(inputs));
  }

  torch::inductor::AOTIModelPackageLoader loader;
};

}  // namespace

TORCH_LIBRARY(moaserve, library) {
  library.class_<Graph>("Graph").def(torch::init<std::string>()).def("run", &Graph::run);
}
