"""Started by every Python under `ds-memo run`: the folder is on PYTHONPATH, where Python imports this name.

The Python may be of any version, with or without ds_memo. Nothing happens and nothing is imported until it imports deepspeed or
accelerate.
"""

import os
import sys


class _Watch:
    """A finder before all others that calls install() once one of the two is imported or searched for."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("deepspeed", "accelerate"):
            return None
        from importlib.util import find_spec

        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        try:
            from ds_memo.integrations.install import install

            install()
        except Exception as error:
            if find_spec(name):
                sys.stderr.write("ds-memo run: " + sys.executable + " runs " + name + " without memo: " + str(error) + "\n")
        return find_spec(name)


def _run_hidden():
    """Run the sitecustomize that this one hides, under the name, as if this folder were not on the path."""
    here, this = os.path.dirname(__file__), sys.modules[__name__]
    sys.path[:] = [folder for folder in sys.path if folder != here]
    del sys.modules[__name__]
    try:
        __import__(__name__)
    except ImportError as error:
        if getattr(error, "name", None) != __name__:
            raise
        sys.modules[__name__] = this  # there is no other
    finally:
        sys.path.insert(0, here)  # some programs pass sys.path to their children


if sys.version_info >= (3, 4):  # noqa: UP036  older ones call finders differently
    sys.meta_path.insert(0, _Watch())
_run_hidden()
