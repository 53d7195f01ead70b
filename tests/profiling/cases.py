"""Small models of four architectures, and the step that the memory tests run."""

import torch
import transformers

BATCH, LENGTH, VOCABULARY = 4, 128, 4000

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    ),
    "bert": lambda: transformers.BertConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=256, n_layer=4, n_head=8, n_positions=512, vocab_size=VOCABULARY
    ),
    "t5": lambda: transformers.T5Config(
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=4,
        num_heads=8,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    ),
}
HEADS = {
    "llama": transformers.AutoModelForCausalLM,
    "bert": transformers.AutoModelForMaskedLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": lambda params: torch.optim.SGD(params, lr=0.1)}


def model_of(name, dtype=torch.float32, train=True, attention="sdpa"):
    config = CONFIGS[name]()
    config._attn_implementation = attention
    return HEADS[name].from_config(config, dtype=dtype).train(train)


def tokens(batch=BATCH, length=LENGTH):
    return torch.randint(0, VOCABULARY, (batch, length))


def training_step(model, optimizer, ids, labels=None):
    """A Trainer's step: the outputs are dropped before backward, the gradients set to None."""

    def step():
        loss = model(input_ids=ids, labels=ids if labels is None else labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
