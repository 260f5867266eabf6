// A layer's settings, noted and compared twice per call: LayerState.note and is_same of ds_memo/remat/layer_state.py, which say
// what is in the list. Python does both where something is not as usual.
#pragma once

#include <pybind11/pybind11.h>

namespace ds_memo::remat {

namespace py = pybind11;

// An attribute came or went, or a parameter is not in its place.
struct Unusual {};

class Settings {
 public:
  // `attributes` is the tuple Attributes: table, size, weights, names.
  void add_part(PyObject* attributes) {
    PyObject* table = PyTuple_GET_ITEM(attributes, 0);
    if (PyDict_Size(table) != PyLong_AsSsize_t(PyTuple_GET_ITEM(attributes, 1))) throw Unusual{};
    add(attributes);
    PyObject* names = PyTuple_GET_ITEM(attributes, 3);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) add(value_in(table, PyTuple_GET_ITEM(names, i)));
    static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
    static PyObject* const buffers = PyUnicode_InternFromString("_buffers");
    static PyObject* const hooks[] = {PyUnicode_InternFromString("_forward_hooks"),
                                      PyUnicode_InternFromString("_forward_hooks_with_kwargs"),
                                      PyUnicode_InternFromString("_forward_hooks_always_called"),
                                      PyUnicode_InternFromString("_forward_pre_hooks"),
                                      PyUnicode_InternFromString("_forward_pre_hooks_with_kwargs")};
    PyObject* own = dict_in(table, parameters);
    if (PyDict_Size(own) < PyLong_AsSsize_t(PyTuple_GET_ITEM(attributes, 2))) throw Unusual{};
    add_items(own);
    add_items(dict_in(table, buffers));
    const bool hooked = PyDict_Size(dict_in(table, hooks[0])) || PyDict_Size(dict_in(table, hooks[3]));
    add(hooked ? Py_True : Py_False);
    if (hooked)
      for (PyObject* name : hooks) add_items(dict_in(table, name));
  }

  void add(PyObject* value) {
    if (PyList_Append(noted.ptr(), value)) throw py::error_already_set();
  }

  py::list noted;

 private:
  // Read past `__getitem__`, by which ZeRO-3 gathers.
  static PyObject* value_in(PyObject* table, PyObject* name) {
    if (PyObject* value = PyDict_GetItemWithError(table, name)) return value;
    if (PyErr_Occurred()) throw py::error_already_set();
    throw Unusual{};
  }

  static PyObject* dict_in(PyObject* table, PyObject* name) {
    PyObject* value = value_in(table, name);
    return PyDict_Check(value) ? value : throw Unusual{};
  }

  void add_items(PyObject* table) {
    add(py::int_(PyDict_Size(table)).ptr());
    PyObject *name, *value;
    if (PyDict_CheckExact(table)) {
      for (Py_ssize_t at = 0; PyDict_Next(table, &at, &name, &value);) add(name), add(value);
    } else if (PyDict_Size(table)) {  // after move_to_end(), an OrderedDict's order is not that of the dict which it is
      auto names = py::reinterpret_steal<py::list>(PySequence_List(table));
      if (!names) throw py::error_already_set();
      for (py::handle each : names) add(each.ptr()), add(value_in(table, each.ptr()));
    }
  }
};

// None: Python has to.
inline py::object note_settings(const py::list& parts, const py::list& parameters) {
  static PyObject* const attributes = PyUnicode_InternFromString("attributes");
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  Settings settings;
  try {
    for (py::handle part : parts) settings.add_part(py::object(part.attr(attributes)).ptr());
    for (py::handle parameter : parameters) settings.add(py::object(parameter.attr(requires_grad)).ptr());
  } catch (const Unusual&) {
    return py::none();
  }
  return settings.noted;
}

inline bool is_same(const py::list& now, const py::list& then) {
  const Py_ssize_t size = PyList_GET_SIZE(now.ptr());
  if (PyList_GET_SIZE(then.ptr()) != size) return false;
  for (Py_ssize_t i = 0; i < size; ++i)
    if (PyList_GET_ITEM(now.ptr(), i) != PyList_GET_ITEM(then.ptr(), i)) return false;
  return true;
}

inline void bind_layer_settings(py::module_& m) {
  m.def("note_settings", &note_settings);
  m.def("is_same", &is_same);
}

}  // namespace ds_memo::remat
