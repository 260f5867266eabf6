// What tiles do often (ds_memo/tiles): they walk autograd's graph of each tile, several times, which takes Python 15 times as
// long; and they run their layer's forward under a mode.
#pragma once

#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ds_memo::tiles {

namespace py = pybind11;
using torch::autograd::Node;
using NodePtr = decltype(torch::autograd::Edge::function);  // torch 2.13 has another pointer than 2.11

inline const at::Tensor& tensor_of(py::handle object) { return THPVariable_Unpack(object.ptr()); }

// Calls `visit` with each node of the graph that made these tensors, until it returns false.
template <class Visit>
void each_node(const py::list& outputs, Visit visit) {
  std::vector<NodePtr> todo;
  std::unordered_set<const Node*> seen;
  for (py::handle output : outputs)
    if (NodePtr node = tensor_of(output).grad_fn(); node && seen.insert(node.get()).second) todo.push_back(std::move(node));
  while (!todo.empty()) {
    const NodePtr node = std::move(todo.back());
    todo.pop_back();
    if (!visit(node)) return;
    for (const auto& edge : node->next_edges())
      if (edge.function && seen.insert(edge.function.get()).second) todo.push_back(edge.function);
  }
}

// The tensor that a node gives its gradient to; null: it is no leaf of a graph.
inline const at::TensorImpl* leaf_of(const Node& node) {
  if (node.num_outputs() != 0) return nullptr;
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
  return leaf == nullptr ? nullptr : leaf->variable.unsafeGetTensorImpl();
}

// Where autograd leads from these results: to "another leaf" than those, to a reentrant "checkpoint", or "" to neither.
inline const char* leads_to(const py::list& results, const py::list& leaves) {
  std::unordered_set<const at::TensorImpl*> known;
  for (py::handle leaf : leaves) known.insert(tensor_of(leaf).unsafeGetTensorImpl());
  const auto is_other = [&](const at::TensorImpl* leaf) { return leaf != nullptr && !known.count(leaf); };
  const char* found = "";
  for (py::handle result : results) {
    const at::Tensor& tensor = tensor_of(result);
    if (tensor.requires_grad() && tensor.is_leaf() && is_other(tensor.unsafeGetTensorImpl())) found = "another leaf";
  }
  each_node(results, [&](const NodePtr& node) {
    if (is_other(leaf_of(*node))) found = "another leaf";
    if (node->num_outputs() == 0 || node->name() != "CheckpointFunctionBackward") return true;
    found = "checkpoint";
    return false;
  });
  return found;
}

// What a node is to the search for weights. A class of nodes has one name, but for functions that are written in Python.
struct Role {
  int right = -1;           // position of a product's right operand
  bool through = false;     // a transpose or a cast
  bool transposes = false;
};

inline const Role& role_of(const Node& node, const py::dict& products, const py::dict& through) {
  static std::unordered_map<const std::type_info*, Role> known;  // the GIL is held
  const auto [at, is_new] = known.try_emplace(&typeid(node));
  if (is_new && std::string(typeid(node).name()).find("PyNode") == std::string::npos) {
    const py::str name(node.name());
    if (products.contains(name)) at->second.right = products[name].cast<int>();
    if ((at->second.through = through.contains(name))) at->second.transposes = through[name].cast<bool>();
  }
  return at->second;
}

// By index of a parameter that is a matrix, its uses: a product whose right operand it is, with true if it is transposed there,
// or None for any other.
inline py::dict weight_uses(
    const py::list& outputs, const py::list& parameters, const py::dict& products, const py::dict& through) {
  std::unordered_map<const at::TensorImpl*, size_t> indices;
  for (size_t index = 0; index < parameters.size(); ++index)
    if (const at::Tensor& parameter = tensor_of(parameters[index]); parameter.dim() == 2)
      indices.emplace(parameter.unsafeGetTensorImpl(), index);
  std::unordered_map<size_t, py::list> uses;
  each_node(outputs, [&](const NodePtr& node) {
    const Role& role = role_of(*node, products, through);
    if (role.through) return true;  // those that use its result count
    for (size_t position = 0; position < node->num_outputs(); ++position) {
      const Node* below = node->next_edge(position).function.get();
      bool transposed = false;
      while (below != nullptr) {
        const Role& passed = role_of(*below, products, through);
        if (!passed.through) break;
        transposed ^= passed.transposes;
        below = below->next_edge(0).function.get();
      }
      const at::TensorImpl* leaf = below == nullptr ? nullptr : leaf_of(*below);
      const auto found = leaf == nullptr ? indices.end() : indices.find(leaf);
      if (found == indices.end()) continue;
      if (role.right != static_cast<int>(position)) uses[found->second].append(py::none());
      else uses[found->second].append(py::make_tuple(
          py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node)), transposed));
    }
    return true;
  });
  py::dict result;
  for (const auto& [index, of_one] : uses) result[py::int_(index)] = of_one;
  return result;
}

// Calls fn(*args, **kwargs) under a mode. As in checkpoint.h, torch does not note the dispatch keys at the entry of each op. It
// is no function of pybind11's, which would take 10 us for the exception that ends a run at attention.
inline PyObject* noted_once(PyObject*, PyObject* arguments) {
  PyObject *fn, *args, *kwargs;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &fn, &PyTuple_Type, &args, &PyDict_Type, &kwargs)) return nullptr;
  at::impl::MaybeSetTLSOnEntryGuard entry;
  c10::impl::ExcludeDispatchKeyGuard no_snapshot(c10::DispatchKey::PythonTLSSnapshot);
  return PyObject_Call(fn, args, kwargs);
}
inline PyMethodDef noted_once_def{"noted_once", noted_once, METH_VARARGS, nullptr};

inline void bind_tiles(py::module_& m) {
  m.attr("noted_once") = py::reinterpret_steal<py::object>(PyCFunction_New(&noted_once_def, nullptr));
  m.def("leads_to", &leads_to);
  m.def("weight_uses", &weight_uses);
}

}  // namespace ds_memo::tiles
