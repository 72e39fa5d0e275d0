"""Error bars of a Hugging Face classifier of which only the LoRA weights are random: `python examples/lora.py`."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, default_collate
from transformers import BertConfig, BertForSequenceClassification

from laplace_sampling import LinearisedLaplace

# A small model with random weights and generated data, so that nothing is downloaded. In practice the model comes from
# `from_pretrained`, the data from a tokenizer, and the model is trained longer before the fit.
torch.manual_seed(0)
config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=12,
    num_labels=3,
)
model = get_peft_model(BertForSequenceClassification(config), LoraConfig(r=2, task_type="SEQ_CLS"))
ids = torch.randint(1, 50, (24, 8))
rows = [{"input_ids": row, "attention_mask": torch.ones(8, dtype=torch.long), "labels": row[0] % 3} for row in ids]
optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
for _ in range(60):
    optimiser.zero_grad()
    model(**default_collate(rows)).loss.backward()
    optimiser.step()

# --8<-- [start:example]
loader = DataLoader(rows, batch_size=8)  # of dictionaries with `input_ids`, `attention_mask` and `labels`
# The two factors of LoRA differ in scale, so the prior is one that does not depend on it.
la = LinearisedLaplace(model, "classification", parameters="*lora*", prior="g-prior", num_samples=16)
la.fit_hyperparameters(loader, progress=False)
pred = la.predict({"input_ids": ids[:4], "attention_mask": torch.ones(4, 8, dtype=torch.long)})
print(pred.probs, pred.mutual_information)
# --8<-- [end:example]
