"""`Checkpoint`: a Keras wrapper that keeps only the inputs of a layer."""

from __future__ import annotations

from typing import Any

import keras

from memory_saving_gradients.by_hand.checkpoint import checkpoint
from memory_saving_gradients.by_hand.split import Policy

if not hasattr(keras, "Model"):
    raise ImportError(
        f"memory_saving_gradients.keras needs Keras, and `import keras` gives {keras!r}, which is "
        "something else: rename that package, or use gradients(), GradientTape or patch()."
    )


@keras.saving.register_keras_serializable("memory_saving_gradients")
class Checkpoint(keras.layers.Wrapper):
    """Wraps a layer or model: only its inputs are kept, and its gradients run it again.

    It works wherever a layer does: in functional, sequential and subclassed models, in `fit`,
    compiled or eager, and is saved and loaded with the model. It saves memory by itself; together
    with `save_memory`, the rest of the model is planned around it.

    Args:
        layer: the layer or model.
        policy: what to keep besides the inputs, as in `checkpoint`. A function must be registered
            with `keras.saving.register_keras_serializable` for the layer to be saved.
        **kwargs: as of any layer (`name`, `dtype` ...).

    Example:
        >>> block = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.1)])
        >>> model = keras.Sequential([Checkpoint(block), keras.layers.Dense(1)])
        >>> model(keras.ops.ones((2, 8))).shape
        TensorShape([2, 1])
    """

    def __init__(self, layer: Any, policy: str | Policy | None = None, **kwargs: Any) -> None:
        super().__init__(layer, **kwargs)
        self.policy = policy
        self.supports_masking = True

    def call(
        self, inputs: Any, *args: Any, training: bool | None = None, mask: Any = None, **kwargs: Any
    ) -> Any:
        outputs, masks, losses = checkpoint(
            self._run, inputs, *args, training=training, mask=mask, policy=self.policy, **kwargs
        )
        for output, known in zip(keras.tree.flatten(outputs), masks, strict=True):
            if known is not None:
                output._keras_mask = known
        for loss in losses:
            self.add_loss(loss)
        return outputs

    def _run(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, list, list]:
        """The layer's outputs, their masks, and the losses of the layer and its sublayers."""
        if not self.layer._call_has_training_arg:
            del kwargs["training"]
        if kwargs["mask"] is None or not self.layer._call_has_mask_arg:
            del kwargs["mask"]
        outputs = self.layer(inputs, *args, **kwargs)
        masks = [getattr(output, "_keras_mask", None) for output in keras.tree.flatten(outputs)]
        losses = [loss for one in self.layer._flatten_layers() for loss in one._get_own_losses()]
        self.layer._clear_losses()
        return outputs, masks, losses

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("training", None)
        return self.layer.compute_output_spec(*args, **kwargs)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self) -> dict[str, Any]:
        policy = self.policy
        if callable(policy):
            policy = keras.saving.serialize_keras_object(policy)
        return {**super().get_config(), "policy": policy}

    @classmethod
    def from_config(cls, config: dict, custom_objects: dict | None = None) -> Checkpoint:
        if isinstance(config.get("policy"), dict):
            policy = keras.saving.deserialize_keras_object(config["policy"], custom_objects)
            config = {**config, "policy": policy}
        return super().from_config(config, custom_objects)
