"""Tag sentences with a model that takes keywords, as Hugging Face's do: dictionaries of ragged samples, collated."""

import torch
import torch.nn.functional as F
from hvdtrain import training
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

VOWELS = "aeiou"


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (count,), generator=generator)
    words = [torch.randint(1, 27, (length,), generator=generator) for length in lengths.tolist()]
    vowels = torch.tensor([ord(vowel) - ord("a") + 1 for vowel in VOWELS])
    return [{"input_ids": word, "labels": torch.isin(word, vowels).long()} for word in words]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": ids != 0, "labels": labels}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(27, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layer(self.embedding(input_ids), src_key_padding_mask=~attention_mask))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main():
    flags = training.parser("records", __doc__, epochs=3, batch_size=32).parse_args()
    with training.start(flags) as run:
        train = DataLoader(samples(1_000, 1), batch_size=flags.batch_size, shuffle=True, collate_fn=collate)
        model = Tagger()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = run.prepare(model, optimizer)
        for epoch in run.epochs(flags.epochs):
            for step in run.steps(train):
                for batch in step.batches():
                    loss = model(**batch)["loss"]
                    step.backward(loss, count=(batch["labels"] >= 0).sum())
                step.update()
    return run.exit_code


if __name__ == "__main__":
    training.main(main)
