"""The reference of transformers: greedy texts of a checkpoint in float32, as JSON. Needs torch and transformers.

python tests/real/reference.py CHECKPOINT FILE.json
"""

import json
import sys
from importlib import import_module
from pathlib import Path

NEW = 60  # tokens
PROMPTS = (
    "What is the capital of France?", "Explain in one sentence why the sky is blue.", "Name three fruits.",
    "How do I boil an egg?", "Write a short poem about rain.", "What is 7 times 8?", "Who wrote Hamlet?",
    "Translate 'good morning' to Spanish.", "What does a compiler do?", "List the days of the week.",
    "Why do cats purr?", "Give me a name for a dog.",
)  # fmt: skip


def main() -> None:
    """Write pairs of a prompt's tokens and those that follow."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    made = []
    for text in PROMPTS:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(text).input_ids
        with torch.no_grad():
            all_ids = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        made.append([list(ids), all_ids[len(ids) :]])
    Path(sys.argv[2]).write_text(json.dumps(made))


if __name__ == "__main__":
    main()
