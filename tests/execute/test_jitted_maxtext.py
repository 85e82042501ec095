"""MaxText's form of a plan."""

import pytest

from tmojax.errors import InputError
from tmojax.execute.jitted_maxtext import maxtext_yaml
from tmojax.execute.jitted_names import NameAction, NamedPlan


def plan(**actions):
    return NamedPlan({name.replace("__", "."): action for name, action in actions.items()}, {}, 1)


def test_names_become_keys():
    found = plan(
        decoder_layer_input=NameAction.OFFLOAD, context=NameAction.SAVE, mlpwi=NameAction.RECOMPUTE
    )  # fmt: skip
    assert maxtext_yaml(found) == "remat_policy: custom\ndecoder_layer_input: offload\ncontext: device\nmlpwi: remat\n"


def test_layers_share_a_key():
    tied = plan(h0__fc=NameAction.OFFLOAD, h1__fc=NameAction.OFFLOAD)
    keys = {"h0.fc": "mlpwi", "h1.fc": "mlpwi"}
    assert maxtext_yaml(tied, keys) == "remat_policy: custom\nmlpwi: offload\n"
    differing = plan(h0__fc=NameAction.OFFLOAD, h1__fc=NameAction.SAVE)
    with pytest.raises(InputError, match=r"key 'mlpwi': the plan has offload for 'h0\.fc' and device for 'h1\.fc'"):
        maxtext_yaml(differing, keys)


def test_mistakes_are_errors():
    with pytest.raises(InputError, match=r"name 'h0\.fc': is no key"):
        maxtext_yaml(plan(h0__fc=NameAction.SAVE))
    with pytest.raises(InputError, match="the plan has no name 'fc'; it has context"):
        maxtext_yaml(plan(context=NameAction.SAVE), {"fc": "mlpwi"})
