"""Without the optional PyTorch, its part says what is missing, and nothing else needs it."""

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is installed here")
def test_the_error_names_the_extra():
    with pytest.raises(ImportError, match=r"pip install 'tmojax\[torch\]'"):
        import tmojax.execute_torch  # noqa: F401


def test_the_rest_does_not_import_it():
    program = "import sys, tmojax.run, tmojax.session; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
