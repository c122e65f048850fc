"""Classify short texts with a Hugging Face model, a small BERT that is not pretrained, on dictionaries of tensors."""

from random import Random

import torch
from hvdtrain import training
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

# 0 pads
WORDS = ["", "[CLS]", "the", "film", "was", "very", "and", "so", "good", "great", "fun", "bad", "dull", "slow"]
GOOD = ("good", "great", "fun")


def texts(count: int, seed: int) -> list[tuple[str, int]]:
    """Return texts such as "the film was very dull and so fun and good", and whether each praises more than it blames."""
    random, found = Random(seed), []
    for _ in range(count):
        parts = [
            (random.choice(["", "very ", "so "]), random.choice(WORDS[8:])) for _ in range(random.choice([1, 3, 5]))
        ]
        praise = sum(1 if word in GOOD else -1 for _, word in parts)
        found.append(("the film was " + " and ".join(how + word for how, word in parts), int(praise > 0)))
    return found


def collate(samples: list[tuple[str, int]]) -> dict[str, Tensor]:
    lines = [[WORDS.index(word) for word in f"[CLS] {text}".split()] for text, _ in samples]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(line) for line in lines], batch_first=True)
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main():
    flags = training.parser("huggingface", __doc__, epochs=6, batch_size=32).parse_args()
    with training.start(flags, metrics={"accuracy": "max"}) as run:
        train = DataLoader(texts(1_000, 1), batch_size=flags.batch_size, shuffle=True, collate_fn=collate)
        test = DataLoader(texts(200, 2), batch_size=100, collate_fn=collate)
        config = BertConfig(
            vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        model = BertForSequenceClassification(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = run.prepare(model, optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(train):
                for batch in step.batches():
                    loss = model(**batch).loss
                    step.backward(loss)
                step.update()
            with run.evaluating(test) as mine:
                for batch in mine:
                    run.record(accuracy=model(**batch).logits.argmax(1) == batch["labels"])
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
