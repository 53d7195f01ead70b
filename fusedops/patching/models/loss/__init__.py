"""The loss of a causal model, without its logits: they are made when someone reads them.

A head (`lm_head`) that is called in a forward with labels gives `LazyLogits`, and the model's loss
function calls the head a second time, for the loss: what hangs on the head's call (the hooks of
FSDP and ZeRO that gather its weight) hangs on that too.
"""

from fusedops.patching.models.loss.site import KEEP, patch_losses

__all__ = ["KEEP", "patch_losses"]
