"""Steps of 20 to 400 ms on one core of a CPU, of the zoo's and Hugging Face's models."""

import torch
from torch import nn

from testbed.zoo import char_crn as chars
from testbed.zoo import rnn as rnns
from testbed.zoo import trn as translation
from testbed.zoo import word_rnn as words
from testbed.zoo import wresnet as residual
from testbed.zoo import wrn as wide


def word_rnn(batch_size=32):
    """Two layers of 192 units, 8 words of 1,000."""
    torch.manual_seed(0)
    model = words.WordRNN(2, 192, words=1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(1000, (8, batch_size))
    return words.step, (model, optimizer, tokens, torch.randint(1000, (8 * batch_size,)))


def char_crn(batch_size=16):
    """Two layers of 128 units, 6 words of 12 letters."""
    torch.manual_seed(0)
    features = {1: 32, 2: 48, 3: 64}
    model = chars.CharCRN(2, 128, features, letters=40, words=500, embedding=15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    letters = torch.randint(40, (6, batch_size, 12))
    return chars.step, (model, optimizer, letters, torch.randint(500, (6 * batch_size,)))


def rnn(batch_size=64):
    """Two layers of 256 units."""
    torch.manual_seed(0)
    model = rnns.RNN(2, 256, features=128, classes=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(8, batch_size, 128)
    return rnns.step, (model, optimizer, inputs, torch.randint(200, (8 * batch_size,)))


def wrn(batch_size=8):
    """WRN-16-2 on images of 32 x 32."""
    torch.manual_seed(0)
    model = wide.WRN(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(batch_size, 3, 32, 32)
    return wide.step, (model, optimizer, images, torch.randint(100, (batch_size,)))


def wresnet(batch_size=8):
    """Five bottlenecks from 16 channels on images of 64 x 64."""
    torch.manual_seed(0)
    model = residual.WResNet((1, 2, 1, 1), 16, classes=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images = torch.randn(batch_size, 3, 64, 64)
    return residual.step, (model, optimizer, images, torch.randint(100, (batch_size,)))


def trn(batch_size=8):
    """Two layers each of model dim 128, sentences of 32 of 1,000 pieces."""
    torch.manual_seed(0)
    model = translation.Transformer(2, 128, 512, heads=4, pieces=1000, length=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    source, target = torch.randint(1, 1000, (2, batch_size, 32)).unbind()
    return translation.step, (model, optimizer, source, target)


def language_step(model, optimizer, tokens):
    """One training step of a Hugging Face model that returns its loss."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss


def _language(model, length, batch_size, words=500):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    return language_step, (model, optimizer, torch.randint(words, (batch_size, length)))


def hf_gpt2(batch_size=4, layers=3, width=128, words=500, length=64):
    """GPT-2, 3 layers of 128 unless said otherwise."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_head=4, n_embd=width, vocab_size=words, n_positions=length,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return _language(model, length, batch_size, words)


def hf_llama(batch_size=4, layers=3, width=128, words=500, length=64):
    """Llama, 3 layers of 128 unless said otherwise."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=43 * width // 16, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=words,
        max_position_embeddings=length,
    )  # fmt: skip
    return _language(transformers.LlamaForCausalLM(config), length, batch_size, words)


def hf_bert(batch_size=4):
    """BERT with a head for masked words, 3 layers of 128."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
        vocab_size=500, max_position_embeddings=64,
    )  # fmt: skip
    return _language(transformers.BertForMaskedLM(config), 64, batch_size)


def mlp(batch_size=256):
    """Four linear layers of 512."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    labels = torch.randint(100, (batch_size,))
    return wide.step, (model, optimizer, torch.randn(batch_size, 512), labels)


#: Measured unless others are named; `mlp` and `wresnet` can be.
MODELS = ("word_rnn", "rnn", "char_crn", "wrn", "trn", "hf_gpt2", "hf_llama", "hf_bert")
