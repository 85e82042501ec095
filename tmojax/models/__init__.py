"""Networks at real sizes, described by shapes alone."""

from tmojax.models.zoo import MODEL_NAMES, Model, build_model, model_options

__all__ = ["MODEL_NAMES", "Model", "build_model", "model_options"]
