"""Networks of the zoo as workloads of a run: one program for each type of GPU, errors that name the run file's key."""

import pytest

from tmojax import load_machine
from tmojax.errors import InputError
from tmojax.importers.model_zoo import ModelWorkload, import_model

SHALLOW = {"stage1": 1, "stage2": 1, "stage3": 1, "stage4": 1}


def test_a_convolutional_network_on_two_types_of_gpu():
    machine = load_machine("two-types-x4")
    spec = ModelWorkload("convnext-tiny", batch=2, dtype="float16", sizes=SHALLOW, optimizer="sgd")
    workload, lines = import_model(spec, machine, 2)
    models = [device.model for device in machine.devices]
    assert len(workload.programs) == len(set(models)) == 2
    assert [workload.device_program[i] == workload.device_program[0] for i in range(4)] == [
        model == models[0] for model in models
    ]
    steps = [sum(op.duration_s for op in program.ops) for program in workload.programs]
    assert steps[0] != steps[1] and all(lines)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelWorkload("convnext-tiny", sizes={"image": 200}), r"workload: model\.image: 200 is no multiple of 32"),
        (ModelWorkload("resnet50", sizes={"layers": 3}), r"workload: model\.layers: unknown option of 'resnet50'"),
        (ModelWorkload("resnet50", sizes={"batch": 3}), r"workload\.sizes\.batch: is not a size; set workload\.batch"),
        (ModelWorkload("resnet51"), r"workload: model: 'resnet51' is unknown; choose one of .*resnet50"),
        (
            ModelWorkload("resnet50", batch=2, gpu="T4", sizes=SHALLOW),
            r"workload: gpu: T4 has no bfloat16 matrix arithmetic; use dtype float16",
        ),
    ],
)
def test_mistakes_name_the_key(spec, message):
    with pytest.raises(InputError, match=message):
        import_model(spec, load_machine("two-types-x4"), 1)
