"""Fuses a language model's loss, where possible without computing the logits.

A head (`lm_head`) that is called in a forward with labels gives `LazyLogits`, and the model's loss
function calls the head a second time, for the loss. Hooks on the head's call (those of FSDP and
ZeRO that gather its weight) therefore run for both calls.

The route of a loss in one forward:

    model.forward             site.py       labels were passed: SCOPE names the model's heads
      head.forward            head.py       the head is in SCOPE: it returns LazyLogits
      model's own lines       logits.py     scale and softcap are noted, no value is computed
      loss_function           site.py       the model's property; it gives Loss.fused
        Loss.fused            function.py   logits are lazy: it asks the head for the loss
          formula             logits.py     the noted scale and softcap
          head.forward        head.py       ASKED holds a question: the head answers with
                                            linear_cross_entropy(hidden, weight, labels)

A read of a value (`outputs.logits.argmax()`) multiplies by the head's weight. If FSDP or ZeRO has
freed that, the head is called in the same way, with a question that it answers with the logits. If
a user's own operation or a hook is between head and loss, `cross_entropy` of read logits runs.
"""
