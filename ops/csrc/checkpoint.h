// The saved-tensor hooks of torch.utils.checkpoint (not reentrant, with early stop) in C++, by the rules at the top of torch's
// file:
//
//   forward     each tensor that autograd saves becomes a Holder, which has a number and no tensor
//   backward    the first holder that is unpacked has the layer run again, up to its last saved tensor. What autograd saves then
//               is given to the holders that are still alive, in the same order, and each gives its own away once
//
// A Checkpoint is one call. A Rerun is its run for one backward: retain_graph has more of them.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <map>

#include "follower.h"

namespace ds_memo::remat {

inline PyObject *stop_error = nullptr, *checkpoint_error = nullptr, *graph_group = nullptr;  // torch's, given once

// A Python object that is a C++ value.
template <class T>
struct Object {
  PyObject_HEAD
  T value;
  inline static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

  static void define(const char* name) {
    type.tp_name = name;
    type.tp_basicsize = sizeof(Object);
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_dealloc = [](PyObject* self) {
      reinterpret_cast<Object*>(self)->value.~T();
      PyObject_Free(self);
    };
    if (PyType_Ready(&type) < 0) throw py::error_already_set();
  }
  static py::object make(T value) {
    auto* object = PyObject_New(Object, &type);
    if (object == nullptr) throw py::error_already_set();
    new (&object->value) T(std::move(value));
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
  }
};
template <class T>
T& of(PyObject* object) { return reinterpret_cast<Object<T>*>(object)->value; }

struct Saved {
  c10::SmallVector<int64_t, 5> sizes;
  at::ScalarType dtype;
  at::Device device;
  bool alive = true;  // false: its holder is gone
};

struct Rerun {
  py::object checkpoint;           // null once it is over: the checkpoint holds it
  std::vector<at::Tensor> tensors;
  size_t packed = 0;
  bool complete = false, stopped = false;
};

using Backward = std::pair<std::intptr_t, bool>;  // number of a graph task, or address of a group of them

struct Checkpoint {
  py::object rerun;      // run(pack, began): runs the layer again with this hook
  py::object follower;   // of the forward; None: it is over
  std::vector<Saved> saved;
  std::map<Backward, py::object> reruns;
  std::vector<py::object> groups;  // kept, so that no other gets the address
};

struct Holder {
  py::object checkpoint;
  size_t index;
  Holder(py::object checkpoint, size_t index) : checkpoint(std::move(checkpoint)), index(index) {}
  Holder(Holder&&) = default;
  ~Holder() {
    if (!checkpoint) return;
    auto& call = of<Checkpoint>(checkpoint.ptr());
    call.saved[index].alive = false;
    for (auto& [backward, rerun] : call.reruns)
      if (auto& tensors = of<Rerun>(rerun.ptr()).tensors; index < tensors.size()) tensors[index].reset();
  }
};

inline PyObject* pack(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  auto& call = of<Checkpoint>(self);
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  if (!call.follower.is_none()) call.follower.cast<Follower&>().note(tensor);
  call.saved.push_back({{tensor.sizes().begin(), tensor.sizes().end()}, tensor.scalar_type(), tensor.device()});
  return Object<Holder>::make({py::reinterpret_borrow<py::object>(self), call.saved.size() - 1}).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyObject* pack_again(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  auto& run = of<Rerun>(self);
  if (!run.checkpoint) throw py::type_error("a layer's replay saved a tensor after it was over");
  auto& call = of<Checkpoint>(run.checkpoint.ptr());
  at::Tensor tensor = THPVariable_Unpack(argument);
  if (tensor.requires_grad()) {  // else a node of the replay that saves its own output would hold itself
    if (tensor.key_set().has(c10::DispatchKey::Python)) {  // a subclass detaches what is inside it
      tensor = tensor.detach();
    } else {
      const c10::DispatchKeySet python({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
      c10::impl::ExcludeDispatchKeyGuard below(python);
      tensor = tensor.tensor_data();
    }
  }
  const size_t index = run.packed++;
  if (index >= call.saved.size()) {
    PyErr_SetString(
        checkpoint_error,
        "torch.utils.checkpoint: trying to save more tensors during recomputation than during the original forward pass.");
    return nullptr;
  }
  if (call.saved[index].alive) run.tensors[index] = tensor;
  if (run.packed == call.saved.size()) {
    run.stopped = true;
    PyErr_SetNone(stop_error);
    return nullptr;
  }
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

// Notes a tensor for a mode, and gives it to the hook below. `self` is both.
inline PyObject* note_and_pack(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  Follower* follower = Table::follower_of(PyTuple_GET_ITEM(self, 0));
  if (follower == nullptr) throw py::type_error("a mode that Python follows notes what is saved in Python");
  follower->note(THPVariable_Unpack(argument));
  return PyObject_CallOneArg(PyTuple_GET_ITEM(self, 1), argument);
  END_HANDLE_TH_ERRORS
}

inline PyObject* same(PyObject*, PyObject* argument) { return Py_NewRef(argument); }

inline PyMethodDef pack_def{"pack", pack, METH_O, nullptr}, pack_again_def{"pack_again", pack_again, METH_O, nullptr},
    note_and_pack_def{"note_and_pack", note_and_pack, METH_O, nullptr},
    same_def{"same", same, METH_O, nullptr};

inline py::object hook(PyMethodDef& definition, PyObject* self) {
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self));
}

// Raise torch's CheckpointError unless a run has saved what the forward had.
inline void compare(const Checkpoint& call, const Rerun& run) {
  std::string differs;
  if (run.packed != call.saved.size())
    differs = "A different number of tensors was saved during the original forward and recomputation.\nNumber of tensors saved "
              "during forward: " + std::to_string(call.saved.size()) + "\nNumber of tensors saved during recomputation: " +
        std::to_string(run.packed) + ".";
  for (size_t i = 0; differs.empty() && i < call.saved.size(); ++i) {
    const Saved& was = call.saved[i];
    const at::Tensor& now = run.tensors[i];
    if (!now.defined() ||
        (now.sizes() == c10::IntArrayRef(was.sizes) && now.scalar_type() == was.dtype && now.device() == was.device))
      continue;
    differs = c10::str(
        "Recomputed values for the following tensors have different metadata than during the forward pass.\ntensor at position ",
        i, ":\nsaved metadata: ", c10::IntArrayRef(was.sizes), ", ", was.dtype, ", ", was.device,
        "\nrecomputed metadata: ", now.sizes(),
        ", ", now.scalar_type(), ", ", now.device());
  }
  if (differs.empty()) return;
  PyErr_SetString(checkpoint_error, ("torch.utils.checkpoint: " + differs).c_str());
  throw py::error_already_set();
}

inline void run_again(py::handle checkpoint, py::handle rerun) {
  auto& call = of<Checkpoint>(checkpoint.ptr());
  auto& run = of<Rerun>(rerun.ptr());
  run.checkpoint = py::reinterpret_borrow<py::object>(checkpoint);
  run.packed = 0;
  run.stopped = false;
  run.tensors.assign(call.saved.size(), {});
  const auto begins = call.rerun;  // the graph may be freed meanwhile
  PyObject* done = PyObject_CallOneArg(begins.ptr(), hook(pack_again_def, rerun.ptr()).ptr());
  run.checkpoint = {};
  Py_XDECREF(done);
  // TorchScript turns the stop into a RuntimeError inside a scripted function, such as Megatron's bias_dropout_add.
  if (done == nullptr && !PyErr_ExceptionMatches(stop_error) && !(run.stopped && PyErr_ExceptionMatches(PyExc_RuntimeError)))
    throw py::error_already_set();
  PyErr_Clear();
  compare(call, run);
  run.complete = true;
}

inline PyObject* unpack(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  const auto holder = py::reinterpret_borrow<py::object>(argument);
  const auto checkpoint = of<Holder>(argument).checkpoint;
  auto& call = of<Checkpoint>(checkpoint.ptr());
  const size_t index = of<Holder>(argument).index;
  Backward backward{torch::autograd::get_current_graph_task_id(), false};
  if (graph_group != nullptr) {
    py::object group = py::handle(graph_group)();
    if (!group.is_none()) {
      backward = {reinterpret_cast<std::intptr_t>(group.ptr()), true};
      if (!call.reruns.count(backward)) call.groups.push_back(std::move(group));
    }
  }
  py::object rerun;
  if (backward == Backward{-1, false}) {  // outside of any backward: a run for this tensor alone
    rerun = Object<Rerun>::make({});
  } else {
    py::object& of_backward = call.reruns[backward];
    if (!of_backward) of_backward = Object<Rerun>::make({});
    rerun = of_backward;
  }
  if (!of<Rerun>(rerun.ptr()).complete) run_again(checkpoint, rerun);
  auto& tensors = of<Rerun>(rerun.ptr()).tensors;  // fewer than holders, if it ran inside the forward
  at::Tensor tensor = index < tensors.size() ? std::move(tensors[index]) : at::Tensor();
  if (!tensor.defined()) {
    PyErr_SetString(
        checkpoint_error,
        "torch.utils.checkpoint: Unpack is being triggered for a tensor that was either never recomputed, or already unpacked "
        "once. "
        "If you are calling ctx.saved_tensors in backward, make sure to do so only once.");
    return nullptr;
  }
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}
inline PyMethodDef unpack_def{"unpack", unpack, METH_O, nullptr};

// The states of torch's own generators, of the host and of a device.
struct RandomStates {
  std::vector<std::pair<at::Generator, at::Tensor>> states;

  explicit RandomStates(const at::Device& device) {
    add(at::detail::getDefaultCPUGenerator());
    if (device.is_cuda()) add(at::globalContext().defaultGenerator(device));
  }
  void add(const at::Generator& generator) { states.emplace_back(generator, Follower::state_of(generator)); }

  // Only what differs is set: few layers draw.
  void set() const {
    for (const auto& [generator, state] : states) {
      const at::Tensor now = Follower::state_of(generator);
      const bool is_same =
          now.nbytes() == state.nbytes() && std::memcmp(now.const_data_ptr(), state.const_data_ptr(), now.nbytes()) == 0;
      if (is_same) continue;
      at::Generator drawn = generator;
      const std::lock_guard<std::mutex> lock(drawn.mutex());
      drawn.set_state(state);
    }
  }
};

// Calls fn(*args) with a mode and saved-tensor hooks on, and generators in given states. Afterwards this thread has the stacks
// and the generators the states that they had, whatever fn did: Ctrl-C may have come between two of its own steps.
inline py::object under(
    py::object mode, py::object pack, py::object unpack, const py::object& fn, const py::tuple& args,
    const RandomStates* states) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Hooks = at::SavedTensorDefaultHooks;
  struct Before {
    Modes modes = Modes::get_state();
    at::impl::SavedTensorDefaultHooksTLS hooks = Hooks::get_tls_state();
    ~Before() {
      Hooks::set_tls_state(hooks);
      Modes::set_state(std::move(modes));
    }
  } before;
  struct Drawn {
    std::optional<RandomStates> now;
    ~Drawn() {
      try {
        if (now) now->set();
      } catch (const std::exception& error) {
        TORCH_WARN("a generator's state could not be put back after a layer's replay: ", error.what());
      }
    }
  } drawn;
  if (states != nullptr) {
    drawn.now = *states;
    for (auto& [generator, state] : drawn.now->states) state = Follower::state_of(generator);
    states->set();
  }
  Hooks::lazy_initialize();
  auto* interpreter = getPyInterpreter();
  Hooks::push_hooks({pack.release().ptr(), interpreter}, {unpack.release().ptr(), interpreter});
  // torch would note the dispatch keys at the entry of each op, at the price of boxing its arguments once more. They are the
  // same.
  at::impl::MaybeSetTLSOnEntryGuard entry;
  c10::impl::ExcludeDispatchKeyGuard no_snapshot(c10::DispatchKey::PythonTLSSnapshot);
  Modes::push_non_infra_mode_onto_stack(
      std::make_shared<c10::impl::PyObject_TorchDispatchMode>(mode.release().ptr(), interpreter));
  return fn(*args);
}

// An input of the layer, saved as autograd saves one: by the hooks that are on, and with its place in the graph.
struct SavedInput {
  torch::autograd::SavedVariable variable;
};

inline void bind_checkpoint(py::module_& m) {
  Object<Checkpoint>::define("ds_memo.Checkpoint");
  Object<Rerun>::define("ds_memo.Rerun");
  Object<Holder>::define("ds_memo.Holder");
  m.def("checkpoint", [](py::object rerun, py::object follower) {
    return Object<Checkpoint>::make({std::move(rerun), std::move(follower)});
  });
  m.def("pack", [](py::object checkpoint) { return hook(pack_def, checkpoint.ptr()); });
  m.def("save_inputs", [](const py::tuple& args, py::object pack, py::object unpack) {
    at::SavedTensorDefaultHooks::lazy_initialize();
    auto* interpreter = getPyInterpreter();
    at::SavedTensorDefaultHooks::push_hooks({pack.release().ptr(), interpreter}, {unpack.release().ptr(), interpreter});
    struct Popped {
      ~Popped() { at::SavedTensorDefaultHooks::pop_hooks(); }
    } popped;
    py::list inputs(args.size());
    for (size_t i = 0; i < args.size(); ++i)
      inputs[i] = THPVariable_Check(args[i].ptr())
          ? py::cast(SavedInput{{THPVariable_Unpack(args[i].ptr()), /*is_output=*/false}}, py::return_value_policy::move)
          : py::object(args[i]);
    return inputs;
  });
  m.def("recorded", [](py::object checkpoint) { of<Checkpoint>(checkpoint.ptr()).follower = py::none(); });
  m.def("noting", [](const py::object& mode, const py::object& pack) {
    return hook(note_and_pack_def, py::make_tuple(mode, pack).ptr());
  });
  py::class_<RandomStates>(m, "RandomStates", py::module_local()).def(py::init([](py::handle device) {
    return new RandomStates(reinterpret_cast<THPDevice*>(device.ptr())->device);
  }));
  m.def("under", &under);
  m.attr("unpack") = hook(unpack_def, nullptr);
  m.attr("same") = hook(same_def, nullptr);
  py::class_<SavedInput>(m, "SavedInput", py::module_local())
      .def("unpack", [](const SavedInput& input) { return wrapped(input.variable.unpack()); });
  m.def("raises", [](py::object stop, py::object error, py::object group) {
    stop_error = stop.release().ptr();
    checkpoint_error = error.release().ptr();
    if (!group.is_none()) graph_group = group.release().ptr();
  });
}

}  // namespace ds_memo::remat
