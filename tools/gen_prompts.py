#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the training prompts for `train_dflash.py` (no network, no GPU).

    python tools/gen_prompts.py --tokenizer TARGET_DIR --out prompts.jsonl.gz \\
        [--count 56000] [--seed 0]

Every prompt comes from one of four places, so the training set carries no third-party
data set:

* ``self``  the start of a user turn ("Write a Python function", "Maria buys", or
            nothing at all); the target model writes the rest of the turn itself before
            it answers it;
* ``code``  functions and docstrings of Python's standard library, as chat requests;
* ``math``  word problems filled in from the templates below;
* ``raw``   standard-library source or documentation without a chat template, to be
            continued.

Line 1 of the output is a header; every other line is ``{"kind", "stage", "ids"}``,
where stage 1 means that ``ids`` ends inside a user turn which the target has to finish
first.
"""

import argparse
import ast
import gzip
import json
import os
import random
import sysconfig
import warnings

MAX_PROMPT_TOKENS = 320

SELF_SEEDS = {
    # name: (weight, user-turn prefixes)
    "open": (30, [""]),
    "code": (
        26,
        [
            "Write a Python function",
            "Write a Python function that",
            "Write a function",
            "Write a Python program",
            "Write a Python class",
            "Write Python code to",
            "Implement a function",
            "Implement a",
            "Create a Python function",
            "Given a list of",
            "Given a string",
            "Given an array",
            "Given two",
            "How do I",
            "How can I write",
            "Complete the following Python function:\n\n```python\ndef",
            "Complete the following code:\n\n```python\n",
            "Write a solution to the following problem and make sure that it passes "
            "the tests:\n```python\ndef",
            "Write a solution to the following problem:\n```python\nfrom typing import "
            "List\n\n\ndef",
            "```python\ndef",
            "def",
            "Here is a Python function:\n\n```python\ndef",
            "Fix the bug in this code:\n\n```python\n",
            "Explain what this code does:\n\n```python\n",
            "Write a JavaScript function",
            "Write a SQL query",
            "Write a C++ program",
            "Write a shell script",
            "Develop a",
            "I have a list of",
            "Your task is to write a function",
            "Can you write a function",
        ],
    ),
    "math": (
        18,
        [
            "{n} has",
            "{n} buys",
            "{n} bought",
            "{n} sells",
            "{n} earns",
            "{n} is",
            "{n} and {m}",
            "{n} wants to",
            "{n} can",
            "{n}'s",
            "{n} makes",
            "{n} reads",
            "{n} walks",
            "{n} spent",
            "There are",
            "A store sells",
            "A farmer has",
            "A train travels",
            "A car",
            "A school",
            "A bakery",
            "If a",
            "If",
            "In a class of",
            "How many",
            "The sum of",
            "What is the value of",
            "Solve for x:",
            "Find the",
            "Calculate",
            "A recipe calls for",
            "A rectangular",
            "It takes",
            "Each",
            "Two",
            "The price of",
            "At the",
            "Last week, {n}",
            "Every day, {n}",
            "On Monday, {n}",
            "A group of",
            "A company",
        ],
    ),
    "general": (
        26,
        [
            "Explain",
            "Explain how",
            "What is",
            "What are",
            "Why",
            "Why do",
            "How does",
            "Describe",
            "Compare",
            "Discuss",
            "Write a short story",
            "Write a poem",
            "Write an essay",
            "Write an email",
            "Write a letter",
            "Write a blog post",
            "Write a",
            "Compose",
            "Draft",
            "Imagine you are",
            "Pretend to be",
            "You are a",
            "Act as",
            "Suppose",
            "Summarize the following",
            "Rewrite the following",
            "Translate",
            "Extract",
            "Classify",
            "Identify",
            "Evaluate",
            "Edit the following paragraph",
            "Given the following",
            "Read the following",
            "Answer the following",
            "List",
            "Give me",
            "Provide",
            "Can you",
            "Could you",
            "Please",
            "I'm",
            "I am",
            "I want to",
            "I need",
            "My",
            "Help me",
            "Who",
            "When",
            "Where",
            "Which",
            "Design",
            "Create a",
            "Plan",
            "Suggest",
            "Propose",
            "Recommend",
            "In what",
            "Is it",
            "Should",
            "Tell me",
            "Analyze",
            "The following",
            "Consider",
            "Do you",
            "What would happen if",
            "What's the difference between",
            "Outline",
            "Generate",
            "Name",
        ],
    ),
}

NAMES = [
    "Maria",
    "James",
    "Aisha",
    "Tom",
    "Li",
    "Priya",
    "Carlos",
    "Emma",
    "Noah",
    "Fatima",
    "Ben",
    "Olga",
    "Kofi",
    "Sara",
    "Ivan",
    "Grace",
    "Leo",
    "Nina",
    "Omar",
    "Julia",
    "Peter",
    "Hana",
    "Diego",
    "Ruth",
    "Sam",
    "Mei",
    "Jack",
    "Lena",
    "Paul",
    "Zoe",
    "Mark",
    "Ella",
    "Raj",
    "Tina",
    "Hugo",
    "Amy",
    "Dan",
    "Iris",
    "Max",
    "Kate",
]
ITEMS = [
    "apples",
    "books",
    "pencils",
    "marbles",
    "cookies",
    "stickers",
    "tickets",
    "oranges",
    "cards",
    "balloons",
    "eggs",
    "flowers",
    "shirts",
    "chairs",
    "bottles",
    "coins",
    "cupcakes",
    "notebooks",
    "toys",
    "candles",
    "muffins",
    "plants",
    "lamps",
    "bags",
    "puzzles",
]
PLACES = [
    "school",
    "library",
    "farm",
    "market",
    "bakery",
    "garden",
    "museum",
    "office",
    "stadium",
    "workshop",
    "bookshop",
    "hotel",
]

MATH = [
    "{n} has {a} {i}. {m} gives {n} {b} more {i}, and then {n} gives away {c}. How "
    "many {i} does {n} have now?",
    "A box holds {b} {i}. If {n} fills {a} boxes and has {c} {i} left over, how many "
    "{i} are there in total?",
    "{n} buys {a} {i} at ${b} each and {c} {j} at ${d} each. How much does {n} spend "
    "altogether?",
    "{n} earns ${b} an hour and works {c} hours a day, {d} days a week. How much does "
    "{n} earn in {a} weeks?",
    "There are {e} students in a {p}. {pc}% of them bring {i}. How many students do "
    "not bring {i}?",
    "{n} reads {a} pages on Monday, twice as many on Tuesday and {b} fewer on "
    "Wednesday than on Tuesday. How many "
    "pages does {n} read in the three days?",
    "A car travels {e} kilometres in {c} hours. At the same speed, how far does it "
    "travel in {d} hours?",
    "{n} is {a} years old. {m} is {b} years older than {n}. What will be the sum of "
    "their ages in {c} years?",
    "A {p} sells {i} for ${b} each. On Saturday it sold {e} of them and on Sunday half "
    "as many. How much money did "
    "the {p} make over the weekend?",
    "{n} saves ${b} every week. {n} already has ${e}. How many weeks will it take to "
    "have ${f}?",
    "{n}, {m} and {k} share {f} {i} equally. {n} then gives {c} of them to {m}. How "
    "many {i} does {m} have?",
    "A rectangle is {a} metres long and {b} metres wide. What are its area and its "
    "perimeter?",
    "A recipe for {c} people needs {d} cups of flour. How many cups are needed for {a} "
    "people?",
    "{n} planted {a} rows of {b} flowers. {c} flowers in each row died. How many "
    "flowers are left?",
    "The price of a coat is ${e}. It is reduced by {pc}% and then {n} uses a coupon "
    "for ${c}. What does {n} pay?",
    "{n} runs {c} kilometres every morning and {d} kilometres every evening. How many "
    "kilometres is that in {a} days?",
    "A tank holds {f} litres. A pump fills it at {b} litres a minute, but it leaks {c} "
    "litres a minute. How long does "
    "it take to fill the tank?",
    "{n} has three times as many {i} as {m}, and {m} has {a} more than {k}. If {k} has "
    "{b} {i}, how many {i} do they "
    "have together?",
    "{n} bakes {a} trays of {d} {i}. {pc}% of them are sold in the morning and {c} in "
    "the afternoon. How many remain?",
    "Each of {a} workers packs {b} boxes an hour. How many boxes do they pack in {c} "
    "hours if {d} of the workers are "
    "absent in the last hour?",
    "Solve for x: {c}x + {a} = {e}.",
    "What is {a} * {b} - {c} * {d}?",
    "Find the average of {a}, {b}, {e} and {c}.",
    "If f(x) = {c}x^2 - {d}x + {a}, what is f({g})?",
    "What is the greatest common divisor of {e} and {f}?",
    "A bag holds {c} red, {d} blue and {a} green balls. What is the probability of "
    "drawing a blue ball?",
    "The sum of two numbers is {f} and their difference is {c}. What are the two "
    "numbers?",
]
MATH_SUFFIX = [
    "",
    "",
    "",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    " Explain your reasoning.",
    "\nLet's think step by step.",
    " Show your work.",
]

CODE_COMPLETE = [
    "Write a solution to the following problem and make sure that it passes the "
    "tests:\n```python\n{c}\n```",
    "Complete the following Python function:\n\n```python\n{c}\n```",
    "Complete this function.\n\n{c}",
    "Finish the implementation below and return the whole function.\n```python\n{c}```",
    "{c}",
    "Please implement the following function in Python.\n\n```python\n{c}\n```",
]
CODE_ASK = [
    "Explain what the following Python code does.\n\n```python\n{c}\n```",
    "Write a docstring for this function:\n\n```python\n{c}\n```",
    "Write unit tests for this function.\n\n```python\n{c}\n```",
    "Is there a bug in this code?\n\n```python\n{c}\n```",
    "Rewrite the following code so that it is easier to read.\n\n```python\n{c}\n```",
    "Translate this Python function to JavaScript.\n\n```python\n{c}\n```",
]
DOC_ASK = [
    "Summarize the following text in two sentences.\n\n{d}",
    "Rewrite this paragraph for a beginner:\n\n{d}",
    "What are the main points of this text?\n\n{d}",
    "Write a Python function that does the following: {d}",
    "Here is some documentation:\n\n{d}\n\nGive an example of how to use it.",
    "Write three questions that somebody could ask about this text.\n\n{d}",
]
RAW_CODE = [
    "from typing import List\n\n\ndef ",
    "def ",
    "import math\n\n\ndef ",
    "class ",
    "#!/usr/bin/env python3\n",
    "from typing import List, Tuple, Optional\n\n\ndef ",
    "# Python\n\ndef ",
    "import re\n\n\ndef ",
    "def is_",
    "def count_",
    "def find_",
    "def get_",
    "def sum_",
    "def max_",
    "def remove_",
    "def sort_",
]
RAW_TEXT = [
    "The ",
    "In ",
    "A ",
    "Once upon a time",
    "It was ",
    "When ",
    "Question: ",
    "# ",
    "There is ",
    "Many ",
    "How to ",
]


def stdlib_material(rng, limit_bytes=40_000_000):
    """Return (functions, docs, sources): (signature+docstring, body source), docstring
    prose, file texts.
    """
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, dirs, names in os.walk(root):
        dirs[:] = [
            d
            for d in dirs
            if d
            not in (
                "site-packages",
                "test",
                "tests",
                "__pycache__",
                "lib2to3",
                "idlelib",
            )
        ]
        files += [os.path.join(folder, n) for n in names if n.endswith(".py")]
    files.sort()
    rng.shuffle(files)
    functions, docs, sources, seen = [], [], [], 0
    for path in files:
        try:
            with open(path, encoding="utf-8") as handle:
                text = handle.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue
        seen += len(text)
        if seen > limit_bytes:
            break
        sources.append(text)
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                doc = ast.get_docstring(node)
                if doc and len(doc) > 120:
                    docs.append(doc[:1200])
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 1:
                continue
            source = lines[node.lineno - 1 : node.end_lineno]
            indent = len(source[0]) - len(source[0].lstrip())
            source = "\n".join(
                line[indent:] if not line[:indent].strip() else line for line in source
            )
            doc = ast.get_docstring(node)
            head = None
            if doc and 40 < len(doc) < 900 and len(node.body) > 1:
                args = ast.unparse(node.args).replace("self, ", "").replace("self", "")
                body = "\n".join(
                    "    " + line if line else "" for line in doc.strip().splitlines()
                )
                head = f'def {node.name}({args}):\n    """{body.strip()}\n    """\n'
            if 80 < len(source) < 1400:
                functions.append((head, source))
            elif head:
                functions.append((head, None))
    return functions, docs, sources


def math_problem(rng):
    text = rng.choice(MATH)
    n, m, k = rng.sample(NAMES, 3)
    i, j = rng.sample(ITEMS, 2)
    return text.format(
        n=n,
        m=m,
        k=k,
        i=i,
        j=j,
        p=rng.choice(PLACES),
        a=rng.randint(6, 40),
        b=rng.randint(3, 25),
        c=rng.randint(2, 9),
        d=rng.randint(2, 12),
        e=rng.choice([40, 48, 60, 72, 80, 96, 100, 120, 150, 180, 200, 240]),
        f=rng.choice([90, 120, 180, 240, 300, 360, 420, 450, 600]),
        g=rng.randint(1, 6),
        pc=rng.choice([10, 20, 25, 30, 40, 50, 60, 75]),
    ) + rng.choice(MATH_SUFFIX)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="folder of the target model")
    parser.add_argument("--out", default="prompts.jsonl.gz")
    parser.add_argument("--count", type=int, default=56000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(args.tokenizer)
    rng = random.Random(args.seed)

    def encode(text):
        return tok(text, add_special_tokens=False)["input_ids"]

    chat = tok.apply_chat_template(
        [{"role": "user", "content": "\x00"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = chat.split("\x00")
    suffix = encode(after)

    functions, docs, sources = stdlib_material(rng)
    heads = [head for head, _ in functions if head]
    bodies = [source for _, source in functions if source]
    print(
        f"standard library: {len(heads)} function heads, {len(bodies)} bodies, "
        f"{len(docs)} docstrings"
    )

    def self_prompt():
        group = rng.choices(
            list(SELF_SEEDS), [weight for weight, _ in SELF_SEEDS.values()]
        )[0]
        n, m = rng.sample(NAMES, 2)
        seed = rng.choice(SELF_SEEDS[group][1]).replace("{n}", n).replace("{m}", m)
        return "self-" + group, 1, before + seed

    def code_prompt():
        pick = rng.random()
        if pick < 0.6:
            text = rng.choice(CODE_COMPLETE).replace("{c}", rng.choice(heads))
        elif pick < 0.8:
            text = rng.choice(CODE_ASK).replace("{c}", rng.choice(bodies))
        else:
            text = rng.choice(DOC_ASK).replace("{d}", rng.choice(docs))
        return "code", 2, before + text + after

    def math_prompt():
        return "math", 2, before + math_problem(rng) + after

    def raw_prompt():
        pick = rng.random()
        if pick < 0.3:
            return "raw-code", 2, rng.choice(RAW_CODE).rstrip(" ")
        if pick < 0.4:
            return "raw-text", 2, rng.choice(RAW_TEXT).rstrip(" ")
        if pick < 0.6:
            return "raw-head", 2, rng.choice(heads)
        if pick < 0.7:
            doc = rng.choice(docs)
            return "raw-doc", 2, doc[: max(60, len(doc) // 2)]
        text = rng.choice(sources)
        start = text.rfind("\n", 0, rng.randrange(max(1, len(text) - 600))) + 1
        return "raw-source", 2, text[start : start + rng.randint(100, 700)]

    makers = [
        (self_prompt, 0.62),
        (code_prompt, 0.14),
        (math_prompt, 0.12),
        (raw_prompt, 0.12),
    ]
    counts = {}
    with gzip.open(args.out, "wt") as out:
        out.write(json.dumps({"suffix": suffix, "stop": tok.eos_token_id}) + "\n")
        written, seen = 0, set()
        while written < args.count:
            maker = rng.choices([m for m, _ in makers], [w for _, w in makers])[0]
            kind, stage, text = maker()
            ids = encode(text)
            if not 1 <= len(ids) <= MAX_PROMPT_TOKENS:
                continue
            if stage == 2 and kind not in ("raw-code", "raw-text"):
                if text in seen:
                    continue
                seen.add(text)
            out.write(
                json.dumps(
                    {"kind": kind, "stage": stage, "ids": ids}, separators=(",", ":")
                )
                + "\n"
            )
            counts[kind] = counts.get(kind, 0) + 1
            written += 1
    print(f"{written} prompts: {counts}")


if __name__ == "__main__":
    main()
