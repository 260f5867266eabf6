// A recipe followed in C++: what Record and Replay (ds_memo/remat) do about nearly every op of a layer.
//
// torch hands an op under a dispatch mode to one function of its interpreter's table, which converts the arguments and calls the
// mode in Python. `install` puts a table in front of it, once and for the process. It forwards every call; but if the mode on top
// of the stack is one of ours and has a Follower, that may run the op itself:
//
//   plain ops                run
//   products of the recipe   counted and kept, or supplied, computed in part, left out
//   a product's bias         added in place, as a part of the product
//   attention, choices       run, or supplied; the mode keeps their outputs, and has them
//   everything else          left to the mode's Python: writes, tensor subclasses, another op than expected
//
// Whatever is left to Python finds the state here (next, packs, awaiting, …), so the two take turns op by op.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ds_memo::remat {

namespace py = pybind11;
using Stack = torch::jit::Stack;
using StashMode = torch::torch_dispatch_mode::StashTorchDispatchModeGuard;

// What an op is, told once by ds_memo.remat.follower.
enum class Kind { plain, gemm, batched, mutates, saved, other };
struct Op {
  Kind kind = Kind::other;
  size_t arguments = 0;
  bool splits = false;        // mm or addmm: its rows can be computed here
  bool adds = false;          // its first operand is added to the product
  bool view = false;          // may stand between a product and its bias
  bool adds_in_place = false;
  bool reads_values = false;  // its operands must be right though nothing of them is saved
};

// One op of a recipe. Without `op` it is a function given to keep_whole.
struct Step {
  std::optional<c10::OperatorHandle> op;
  bool gemm = false, wanted = true, biased = false;
  bool supplied = false;  // no product: the replay supplies its outputs
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  int64_t flops = 0, m = 0, rows = 0;
  py::object kept = py::none();
  py::object index;             // of what is kept, in the frame
  std::vector<int64_t> stride;  // of what is kept
};

struct Program {
  std::vector<Step> steps;

  // Names of the ops ("" for a function), and Gemm or SavedOp of ds_memo.remat.recipe.
  explicit Program(const std::vector<std::pair<std::string, py::object>>& ops) {
    for (const auto& [name, op] : ops) {
      Step& step = steps.emplace_back();
      if (!name.empty()) {
        const auto dot = name.find('.');
        const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
        step.op = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
      }
      if (!(step.gemm = py::hasattr(op, "flops"))) {
        step.supplied = !op.attr("kept").is_none();
        continue;
      }
      step.wanted = op.attr("wanted").cast<bool>();
      step.biased = op.attr("biased").cast<bool>();
      step.shape = op.attr("shape").cast<std::vector<int64_t>>();
      step.dtype = reinterpret_cast<THPDtype*>(op.attr("dtype").ptr())->scalar_type;
      step.flops = op.attr("flops").cast<int64_t>();
      step.m = op.attr("m").cast<int64_t>();
      step.rows = op.attr("rows").cast<int64_t>();
      step.kept = op.attr("kept");
      if (step.kept.is_none()) continue;
      step.index = step.kept.attr("index");
      step.stride = step.kept.attr("stride").cast<std::vector<int64_t>>();
    }
  }
};

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& one : value.toListRef()) each_tensor(one, visit);
  }
}

inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

inline py::object wrapped(const at::Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

// Converts the outputs of attention and choices, which are tensors and numbers. Returns null for anything else.
inline py::object to_python(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? wrapped(value.toTensor()) : py::object(py::none());
  if (value.isInt()) return py::int_(value.toInt());
  return value.isNone() ? py::object(py::none()) : py::object();
}

inline c10::IValue from_python(py::handle value, const c10::Type& type) {
  if (THPVariable_Check(value.ptr())) return THPVariable_Unpack(value.ptr());
  if (value.is_none()) return type.kind() == c10::TypeKind::TensorType ? c10::IValue(at::Tensor()) : c10::IValue();
  return value.cast<int64_t>();
}

// Follows one run of a layer, or of a part of it, in one thread. Python objects are touched with the GIL held; plain ops need
// none.
// Its mode alone keeps it.
struct Follower {
  std::shared_ptr<Program> program;
  PyObject* mode;  // it owns this
  py::object call;
  bool replays;
  py::object frame;
  py::object numbers;  // of the layer's parameters by id; None: the call does not ask for them
  py::dict tensors;    // the frame's that a record keeps on the device, and that a replay reads
  bool in_frame;       // false: the engine keeps a tensor, and the frame gives it

  int64_t next = 0;            // index of the recipe's next op
  int64_t packs = 0;           // tensors that autograd has saved
  bool following = true;       // false: the call has left its recipe
  py::object noted = py::none();  // a list that takes what autograd saves; None: it is counted
  int64_t flops = 0;           // of products that a replay has computed
  std::optional<std::pair<int64_t, at::Tensor>> awaiting;  // index and product whose bias comes next
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> left_out;
  // Weak references keep an address from being taken by another storage.

  inline static std::atomic<int64_t> ran = 0, left = 0;  // ops of this process that were run here, and that were left to Python
  inline static std::atomic<int64_t> made = 0;           // changes whenever a follower begins or ends

  Follower(std::shared_ptr<Program> program, PyObject* mode, py::object call, bool replays)
      : program(std::move(program)), mode(mode), call(std::move(call)), replays(replays) {
    frame = this->call.attr("frame");
    const py::object before = this->call.attr("before");
    numbers = before.is_none() ? before : py::object(before.attr("state").attr("number_of"));
    const bool resident = !frame.is_none() && frame.attr("resident").cast<bool>();
    in_frame = replays ? !frame.is_none() && py::len(frame.attr("changed")) == 0 : resident;
    if (in_frame) tensors = frame.attr(resident ? "device" : "slots");
    ++made;
  }
  ~Follower() { ++made; }

  // Returns false if Python shall run the op; nothing has happened then.
  bool run(const Op& info, const c10::OperatorHandle& op, Stack* stack) {
    const size_t count = info.arguments;
    const c10::IValue* args = stack->data() + (stack->size() - count);
    bool subclass = false, reads = false;
    for (size_t i = 0; i < count; ++i)
      each_tensor(args[i], [&](const at::Tensor& tensor) {
        subclass |= tensor.key_set().has(c10::DispatchKey::Python);
        reads |= !left_out.empty() && left_out.count(storage_of(tensor));
      });
    if (subclass || info.kind == Kind::other) return false;
    const bool listed = info.kind != Kind::plain && info.kind != Kind::mutates;
    if (replays && info.kind == Kind::plain) return run_op(op, stack);
    if (!replays && (!following || (listed && reads))) return false;
    if (info.kind == Kind::plain && !awaiting && !reads) return run_op(op, stack);
    py::gil_scoped_acquire gil;
    if (info.kind == Kind::saved) return replays ? supply_saved(op, stack) : keep_saved(op, stack);
    if (replays) return listed ? supply(info, op, stack, args) : replay_write(info, op, stack, args, count);
    return listed ? keep(info, op, stack, args) : record_plain(info, op, stack, args, reads);
  }

  // ---- record

  bool record_plain(const Op& info, const c10::OperatorHandle& op, Stack* stack, const c10::IValue* args, bool reads) {
    if (info.kind == Kind::mutates) {
      if (!awaiting || reads || !adds_bias(info, args)) return false;
      run_op(op, stack);
      const auto [index, product] = *std::exchange(awaiting, std::nullopt);
      keep_rows(program->steps[index], product);
      return true;
    }
    if ((awaiting && !info.view) || (reads && info.reads_values)) return false;
    run_op(op, stack);
    if (reads)
      for (size_t i = op.schema().returns().size(); i > 0; --i)
        each_tensor((*stack)[stack->size() - i], [&](const at::Tensor& tensor) { leave_out(tensor); });
    return true;
  }

  bool keep(const Op& info, const c10::OperatorHandle& op, Stack* stack, const c10::IValue* args) {
    const Step* step = expected(op);
    if (step == nullptr || !step->gemm || awaiting) return false;
    const int64_t depth = args[info.adds].toTensor().size(-1);
    py::object number = weight_number(args[info.adds + 1].toTensor());
    run_op(op, stack);
    const at::Tensor& out = stack->back().toTensor();
    if (out.sizes() != c10::IntArrayRef(step->shape) || out.scalar_type() != step->dtype ||
        (!step->kept.is_none() && !out.is_contiguous())) {
      StashMode off;
      py::handle(mode).attr("left_with")(info.kind == Kind::gemm ? 2 * out.numel() * depth : 0);
      return true;
    }
    if (number) call.attr("weights")[py::int_(next)] = number;
    const int64_t index = next++;
    if (!step->wanted) leave_out(out);
    if (step->kept.is_none()) return true;
    StashMode off;
    const at::Tensor product = out.dim() == 2 ? out : out.flatten(0, -2);
    if (step->biased) awaiting.emplace(index, product);
    else keep_rows_stashed(*step, product);
    return true;
  }

  void keep_rows(const Step& step, const at::Tensor& product) {
    StashMode off;
    keep_rows_stashed(step, product);
  }
  // As ds_memo.swap.engine's keep, which has the frames whose rows go to the host.
  void keep_rows_stashed(const Step& step, const at::Tensor& product) {
    if (in_frame && product.strides() == c10::IntArrayRef(step.stride)) {
      const at::Tensor source = product.detach();
      py::dict versions = frame.attr("versions");
      tensors[step.index] = wrapped(source);
      versions[step.index] = source._version();
    } else {
      call.attr("engine").attr("keep")(frame, step.kept, wrapped(product));
    }
  }

  bool keep_saved(const c10::OperatorHandle& op, Stack* stack) {
    const auto& returns = op.schema().returns();
    if (expected(op) == nullptr || awaiting || !simple(returns)) return false;
    const at::Device device = reinterpret_cast<THPDevice*>(call.attr("engine").attr("device").ptr())->device;
    const at::Generator generator =
        device.is_cuda() ? at::globalContext().defaultGenerator(device) : at::detail::getDefaultCPUGenerator();
    const at::Tensor before = state_of(generator);
    run_op(op, stack);
    const at::Tensor after = state_of(generator);
    const bool drew = std::memcmp(before.const_data_ptr(), after.const_data_ptr(), before.nbytes()) != 0;
    py::tuple outputs(returns.size());
    for (size_t i = 0; i < returns.size(); ++i) outputs[i] = to_python((*stack)[stack->size() - returns.size() + i]);
    StashMode off;
    py::handle(mode).attr("ran_saved")(outputs, drew ? wrapped(after) : py::object(py::none()));
    return true;
  }

  static at::Tensor state_of(at::Generator generator) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  }

  // True if these are tensors and numbers.
  static bool simple(const std::vector<c10::Argument>& returns) {
    return std::all_of(returns.begin(), returns.end(), [](const c10::Argument& one) {
      return one.type()->kind() == c10::TypeKind::TensorType || one.real_type()->kind() == c10::TypeKind::IntType ||
          one.real_type()->kind() == c10::TypeKind::SymIntType;
    });
  }

  void leave_out(const at::Tensor& tensor) {
    if (auto* storage = storage_of(tensor); storage != nullptr && !left_out.count(storage))
      left_out.emplace(storage, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }

  // Autograd saves a tensor in the forward.
  void note(const at::Tensor& tensor) {
    if (!noted.is_none()) {
      noted.attr("append")(wrapped(tensor));
      return;
    }
    ++packs;
    if (following && !left_out.empty() && left_out.count(storage_of(tensor))) py::handle(mode).attr("leave")();
  }

  // ---- replay

  bool replay_write(const Op& info, const c10::OperatorHandle& op, Stack* stack, const c10::IValue* args, size_t count) {
    if (!awaiting) return run_op(op, stack);
    if (!adds_bias(info, args)) return false;
    const at::Tensor self = args[0].toTensor(), bias = args[1].toTensor();
    const auto [index, product] = *std::exchange(awaiting, std::nullopt);
    const int64_t rows = program->steps[index].rows;  // stored rows have the bias already
    StashMode off;
    py::gil_scoped_release no_gil;
    product.narrow(0, rows, product.size(0) - rows).add_(bias);
    put(stack, count, self);
    return true;
  }

  bool supply(const Op& info, const c10::OperatorHandle& op, Stack* stack, const c10::IValue* args) {
    const Step* step = expected(op);
    if (step == nullptr || !step->gemm || !info.splits) return false;
    const at::Tensor left = args[info.adds].toTensor(), right = args[info.adds + 1].toTensor();
    if (step->shape.size() != 2 || left.size(0) != step->shape[0] || right.size(1) != step->shape[1]) return false;
    py::dict weights = call.attr("weights");
    if (PyObject* was = PyDict_GetItem(weights.ptr(), py::int_(next).ptr())) {
      py::object now = weight_number(right);
      if (!now || PyObject_RichCompareBool(was, now.ptr(), Py_EQ) != 1) return false;  // Python raises the error
    }
    const size_t count = info.arguments;
    if (!step->wanted) {
      ++next;
      StashMode off;
      put(stack, count, at::empty(step->shape, left.options().dtype(step->dtype)));
      return true;
    }
    const int64_t rest = step->m - step->rows;
    if (step->m) flops += step->flops * rest / step->m;
    const int64_t index = next++;
    if (step->kept.is_none()) return run_op(op, stack);
    StashMode off;
    const at::Tensor out = kept_tensor(*step);
    if (rest) {
      py::gil_scoped_release no_gil;
      at::Tensor into = out.narrow(0, step->rows, rest);
      const at::Tensor rows = left.narrow(0, step->rows, rest);
      if (info.adds) {
        const at::Tensor bias = args[0].toTensor();
        const bool per_row = bias.dim() == 2 && bias.size(0) == out.size(0) && bias.size(0) > 1;
        at::addmm_out(
            into, per_row ? bias.narrow(0, step->rows, rest) : bias, rows, right, args[3].toScalar(), args[4].toScalar());
      } else {
        at::mm_out(into, rows, right);
      }
    }
    if (step->biased) awaiting.emplace(index, out.detach());
    put(stack, count, out.view(step->shape));
    return true;
  }

  // As ds_memo.swap.frame's tensor, which has the frames with tensors that the layer changes.
  at::Tensor kept_tensor(const Step& step) const {
    PyObject* found = in_frame ? PyDict_GetItem(tensors.ptr(), step.index.ptr()) : nullptr;
    if (found != nullptr) return THPVariable_Unpack(found).detach();
    return THPVariable_Unpack(frame.attr("tensor")(step.kept).ptr());
  }

  bool supply_saved(const c10::OperatorHandle& op, Stack* stack) {
    const Step* step = expected(op);
    const auto& returns = op.schema().returns();
    if (step == nullptr || !step->supplied || !simple(returns)) return false;
    StashMode off;
    const py::tuple outputs = py::handle(mode).attr("supplied")(next++);
    stack->resize(stack->size() - op.schema().arguments().size());
    for (size_t i = 0; i < returns.size(); ++i) stack->push_back(from_python(outputs[i], *returns[i].type()));
    return true;
  }

  // ---- both

  const Step* expected(const c10::OperatorHandle& op) const {
    if (next >= static_cast<int64_t>(program->steps.size())) return nullptr;
    const Step& step = program->steps[next];
    return step.op && *step.op == op ? &step : nullptr;
  }

  // The number of the layer's parameter that is a right operand, None if it is none, null if the call does not ask.
  py::object weight_number(const at::Tensor& right) const {
    if (numbers.is_none()) return {};
    py::object owner = wrapped(right.is_view() ? at::Tensor(right._base()) : right);
    PyObject* found = PyDict_GetItem(numbers.ptr(), py::int_(reinterpret_cast<std::intptr_t>(owner.ptr())).ptr());
    return found == nullptr ? py::object(py::none()) : py::reinterpret_borrow<py::object>(found);
  }

  // As ds_memo.remat.op_policy.adds_bias_to.
  bool adds_bias(const Op& info, const c10::IValue* args) const {
    if (!info.adds_in_place || !args[1].isTensor() || !args[2].toScalar().equal(1)) return false;
    const at::Tensor &self = args[0].toTensor(), &bias = args[1].toTensor(), &product = awaiting->second;
    return self.data_ptr() == product.data_ptr() && self.numel() == product.numel() && self.is_contiguous() &&
        bias.sizes() == product.sizes().slice(1);
  }

  static bool run_op(const c10::OperatorHandle& op, Stack* stack) {
    StashMode off;
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    op.callBoxed(stack);
    return true;
  }

  static void put(Stack* stack, size_t arguments, at::Tensor out) {
    stack->resize(stack->size() - arguments);
    stack->emplace_back(std::move(out));
  }
};

// ---- the interpreter's table

inline PyObject* describe = nullptr;     // tells what an op is: (name, overload) -> tuple
inline PyTypeObject* mode_type = nullptr;  // ds_memo.remat.modes.Mode

// Counts ops that torch has forgotten. Another op may then have the handle of one of them.
struct Forgotten final : c10::OpRegistrationListener {
  inline static std::atomic<int64_t> ops = 0;
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override { ++ops; }
};

inline Op op_of(const c10::OperatorHandle& handle) {
  static thread_local std::unordered_map<c10::OperatorHandle, Op> known;
  static thread_local int64_t forgotten = 0;
  if (const int64_t now = Forgotten::ops; now != forgotten) {
    forgotten = now;
    known.clear();
  }
  if (auto at = known.find(handle); at != known.end()) return at->second;
  py::gil_scoped_acquire gil;
  StashMode off;
  const auto& name = handle.operator_name();
  const auto told = py::handle(describe)(name.name, name.overload_name).cast<std::tuple<int, bool, bool, bool, bool, bool>>();
  const auto [kind, splits, adds, view, adds_in_place, reads_values] = told;
  const size_t arguments = handle.schema().arguments().size();
  const Op op{static_cast<Kind>(kind), arguments, splits, adds, view, adds_in_place, reads_values};
  return known.emplace(handle, op).first->second;
}

struct Table final : c10::impl::PyInterpreterVTable {
  using Self = c10::TensorImpl;
  const c10::impl::PyInterpreterVTable* torchs;
  explicit Table(const c10::impl::PyInterpreterVTable* torchs) : torchs(torchs) {}

  void dispatch(const c10::OperatorHandle& op, Stack* stack) const override {
    if (!followed(op, stack)) torchs->dispatch(op, stack);
  }

  // A null result has torch copy the tensor itself.
  c10::intrusive_ptr<Self> detach(const Self* tensor) const override {
    const bool torchs_own = tensor->key_set().has(c10::DispatchKey::Python) || top() == nullptr;
    return torchs_own ? torchs->detach(tensor) : c10::intrusive_ptr<Self>();
  }

  // The follower of the mode on top, if C++ follows there.
  static Follower* top() {
    using Modes = c10::impl::TorchDispatchModeTLS;
    const auto depth = Modes::stack_len();
    if (depth == 0) return nullptr;
    PyObject* mode = Modes::get_stack_at(depth - 1)->ptr(getPyInterpreter());
    return follower_of(mode);
  }

  static bool followed(const c10::OperatorHandle& op, Stack* stack) {
    try {
      Follower* follower = top();
      if (follower == nullptr) return false;
      const bool done = follower->run(op_of(op), op, stack);
      ++(done ? Follower::ran : Follower::left);
      return done;
    } catch (py::error_already_set& error) {  // as torch's own function has it
      py::gil_scoped_acquire gil;
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }

  // The follower in a mode's attribute `at`; null if Python follows. The latest answer holds while no follower begins or ends.
  static Follower* follower_of(PyObject* mode) {
    struct Latest { PyObject* mode = nullptr; Follower* follower = nullptr; int64_t made = -1; };
    static thread_local Latest latest;
    if (latest.mode == mode && latest.made == Follower::made) return latest.follower;
    if (!PyType_IsSubtype(Py_TYPE(mode), mode_type)) return nullptr;
    py::gil_scoped_acquire gil;
    py::object at = py::reinterpret_steal<py::object>(PyObject_GetAttrString(mode, "at"));
    if (!at) throw py::error_already_set();
    latest = {mode, py::isinstance<Follower>(at) ? &at.cast<Follower&>() : nullptr, Follower::made};
    return latest.follower;
  }

  // clang-format off
  std::string name() const override { return torchs->name(); }
  void incref(PyObject* o) const override { torchs->incref(o); }
  void decref(PyObject* o) const override { torchs->decref(o); }
  bool try_incref(const c10::impl::PyObjectSlot& s) const override { return torchs->try_incref(s); }
  size_t refcnt(PyObject* o) const override { return torchs->refcnt(o); }
  void reportErrorCallback(PyObject* c, c10::DispatchKey k) const override { torchs->reportErrorCallback(c, k); }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey k, c10::DispatchKeySet ks, Stack* s, bool a, bool b) const override { torchs->python_op_registration_trampoline(op, k, ks, s, a, b); }
  void throw_abstract_impl_not_imported_error(std::string a, const char* b, const char* c) const override { torchs->throw_abstract_impl_not_imported_error(a, b, c); }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet k, Stack* s) const override { torchs->python_dispatcher(op, k, s); }
  bool is_contiguous(const Self* t, at::MemoryFormat f) const override { return torchs->is_contiguous(t, f); }
  c10::SymBool sym_is_contiguous(const Self* t, at::MemoryFormat f) const override { return torchs->sym_is_contiguous(t, f); }
  bool is_strides_like(const Self* t, at::MemoryFormat f) const override { return torchs->is_strides_like(t, f); }
  bool is_non_overlapping_and_dense(const Self* t) const override { return torchs->is_non_overlapping_and_dense(t); }
  c10::Device device(const Self* t) const override { return torchs->device(t); }
  int64_t dim(const Self* t) const override { return torchs->dim(t); }
  c10::IntArrayRef strides(const Self* t) const override { return torchs->strides(t); }
  c10::IntArrayRef sizes(const Self* t) const override { return torchs->sizes(t); }
  c10::SymIntArrayRef sym_sizes(const Self* t) const override { return torchs->sym_sizes(t); }
  c10::Layout layout(const Self* t) const override { return torchs->layout(t); }
  int64_t numel(const Self* t) const override { return torchs->numel(t); }
  c10::SymInt sym_numel(const Self* t) const override { return torchs->sym_numel(t); }
  c10::SymIntArrayRef sym_strides(const Self* t) const override { return torchs->sym_strides(t); }
  c10::SymInt sym_storage_offset(const Self* t) const override { return torchs->sym_storage_offset(t); }
  void trace_gpu_event_creation(c10::DeviceType d, uintptr_t e) const override { torchs->trace_gpu_event_creation(d, e); }
  void trace_gpu_event_deletion(c10::DeviceType d, uintptr_t e) const override { torchs->trace_gpu_event_deletion(d, e); }
  void trace_gpu_event_record(c10::DeviceType d, uintptr_t e, uintptr_t s) const override { torchs->trace_gpu_event_record(d, e, s); }
  void trace_gpu_event_wait(c10::DeviceType d, uintptr_t e, uintptr_t s) const override { torchs->trace_gpu_event_wait(d, e, s); }
  void trace_gpu_memory_allocation(c10::DeviceType d, uintptr_t p) const override { torchs->trace_gpu_memory_allocation(d, p); }
  void trace_gpu_memory_deallocation(c10::DeviceType d, uintptr_t p) const override { torchs->trace_gpu_memory_deallocation(d, p); }
  void trace_gpu_stream_creation(c10::DeviceType d, uintptr_t s) const override { torchs->trace_gpu_stream_creation(d, s); }
  void trace_gpu_device_synchronization(c10::DeviceType d) const override { torchs->trace_gpu_device_synchronization(d); }
  void trace_gpu_stream_synchronization(c10::DeviceType d, uintptr_t s) const override { torchs->trace_gpu_stream_synchronization(d, s); }
  void trace_gpu_event_synchronization(c10::DeviceType d, uintptr_t e) const override { torchs->trace_gpu_event_synchronization(d, e); }
  void reset_backward_hooks(const Self* t) const override { torchs->reset_backward_hooks(t); }
  // clang-format on
};

inline void bind_follower(py::module_& m) {
  py::class_<Program, std::shared_ptr<Program>>(m, "Program", py::module_local())
      .def(py::init<const std::vector<std::pair<std::string, py::object>>&>());
  py::class_<Follower>(m, "Follower", py::module_local())
      .def(py::init([](std::shared_ptr<Program> program, py::handle mode, py::object call, bool replays) {
        return new Follower(std::move(program), mode.ptr(), std::move(call), replays);
      }))
      .def_readwrite("next", &Follower::next)
      .def_readwrite("packs", &Follower::packs)
      .def_readwrite("following", &Follower::following)
      .def_readwrite("noted", &Follower::noted)
      .def_readonly("flops", &Follower::flops)
      .def_property(
          "awaiting",
          [](const Follower& follower) -> py::object {
            if (!follower.awaiting) return py::none();
            return py::make_tuple(follower.awaiting->first, wrapped(follower.awaiting->second));
          },
          [](Follower& follower, const py::object& awaiting) {
            follower.awaiting.reset();
            if (awaiting.is_none()) return;
            const auto pair = awaiting.cast<py::tuple>();
            follower.awaiting.emplace(pair[0].cast<int64_t>(), THPVariable_Unpack(pair[1].ptr()));
          })
      .def("leave_out", [](Follower& follower, py::handle tensor) { follower.leave_out(THPVariable_Unpack(tensor.ptr())); })
      .def("overwritten", [](Follower& follower, std::intptr_t storage) {
        follower.left_out.erase(reinterpret_cast<c10::StorageImpl*>(storage));
      })
      .def("leaves_out", [](const Follower& follower, std::intptr_t storage) {
        return follower.left_out.count(reinterpret_cast<c10::StorageImpl*>(storage)) > 0;
      })
      .def_property_readonly("leaves_any_out", [](const Follower& follower) { return !follower.left_out.empty(); });
  m.def("counts", [] { return std::make_pair(Follower::ran.load(), Follower::left.load()); });
  m.def("install", [](py::object describes, py::object type) {
    if (describe != nullptr) return;
    describe = describes.release().ptr();
    mode_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
    // Neither is ever deleted: torch's own live as long.
    new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Forgotten>()));
    auto* interpreter = getPyInterpreter();
    interpreter->vtable_ = new Table(interpreter->vtable_);
  });
}

}  // namespace ds_memo::remat
