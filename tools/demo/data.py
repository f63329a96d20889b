"""Procedural chat data for the demo model.

Every conversation is drawn from a seeded random generator, so the corpus can be rebuilt at any size and no text is downloaded
(a small public-domain file can be mixed in as raw text).  `python data.py --help` writes the tokenizer sample or token shards.
Shards are uint16: the token id, with bit 15 set where the token carries loss (assistant replies and raw text).
"""

import argparse
import json
import random
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from code_patterns import CLASSES, PATTERNS
from facts import (
    ADJ,
    ANIMALS,
    CAPITALS,
    CITIES,
    CONTINENT,
    CURRENCY,
    DAYS,
    ELEMENTS,
    HOWTO,
    ITEMS,
    LISTS,
    MIX,
    MONTH_DAYS,
    MONTHS,
    NAMES,
    NOUNS,
    OPPOSITES,
    PAST,
    PLANETS,
    PLURAL,
    RHYMES,
    THING_COLOR,
    WORDS,
)

LOSS_BIT = 0x8000
DIGITS = "zero one two three four five six seven eight nine ten eleven twelve".split()
SYSTEMS = [
    "You are a helpful assistant.",
    "You are pyspec-demo, a tiny helpful model.",
    "Answer briefly.",
    "You are a careful assistant.",
]


GIRLS = set(
    """Anna Clara Emma Grace Iris Kate Mia Olivia Rosa Tara Uma Wendy Yara Zoe Alice Carol Eve Gina Ines Kira Maya Nina Petra Sara
Vera Lena Ada Grete Julia Lucy Nora Pia Rita Ursula Hana Mei Leila Elena Quinn""".split()
)
SYL = "ba be bi bo bu da de di do du fa fe fi ga go ka ke ki ko la le li lo lu ma me mi mo mu na ne ni no pa pe po ra re ri ro sa se si so ta te ti to va ve vi vo za zo".split()


def cap(s):
    return s[:1].upper() + s[1:]


def a_an(w):
    return ("an " if w[0].lower() in "aeiou" else "a ") + w


def made_up(r):
    return "".join(r.choice(SYL) for _ in range(r.randint(2, 4))) + r.choice(["", "n", "r", "l", "s", "x"])


def plural(w):
    return (
        w[:-1] + "ies"
        if w.endswith("y") and w[-2] not in "aeiou"
        else w + "es"
        if w.endswith(("x", "s", "sh", "ch"))
        else w + "s"
    )


def ask(r, imperative):
    """Vary how a request is phrased."""
    x = r.random()
    if r.random() < 0.06:
        return (
            r.choice(
                [
                    "I want you to ",
                    "I would like you to ",
                    "Would you ",
                    "Just ",
                    "hey can you ",
                    "Hello, please ",
                    "Help me: ",
                    "Try to ",
                    "Quickly ",
                ]
            )
            + imperative[0].lower()
            + imperative[1:]
        )
    if r.random() < 0.08:
        return imperative.lower() if ":" not in imperative else imperative[0].lower() + imperative[1:]
    low = imperative[0].lower() + imperative[1:]
    if x < 0.55:
        s = imperative
    elif x < 0.65:
        s = "Please " + low
    elif x < 0.75:
        s = "Can you " + low
    elif x < 0.82:
        s = "Could you " + low
    elif x < 0.87:
        s = "I need you to " + low
    elif x < 0.92:
        s = imperative + ", please"
    else:
        s = r.choice(["Hey, ", "Hi! ", "Now ", "OK, "]) + low
    if s.startswith(("Can you", "Could you")):
        return s + r.choice(["?", "?", ""])
    return s + r.choice([".", "", "", "!"]) if not s.endswith((".", ":", "?")) else s


def noise(r, s):
    """Sloppy typing: lower case first letter, missing final mark."""
    if r.random() < 0.15:
        s = s[0].lower() + s[1:]
    if r.random() < 0.12 and s[-1] in ".?!":
        s = s[:-1]
    return s


def num_list(r, lo=3, hi=8, top=None):
    top = top or r.choice([10, 20, 50, 100, 1000])
    return [r.randint(0, top) for _ in range(r.randint(lo, hi))]


def show(r, xs):
    sep = r.choice([", ", ", ", " ", ","])
    return sep.join(map(str, xs))


def join_and(xs):
    return xs[0] if len(xs) == 1 else ", ".join(xs[:-1]) + " and " + xs[-1]


# ---------------------------------------------------------------- talk about itself
ABOUT = (
    "I am pyspec-demo, a tiny model that ships with pyspec. I run on a plain CPU and I was trained on generated text, "
    "so I can do small tasks but I know little about the world."
)
IDENTITY = [
    (
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Introduce yourself.",
            "Are you ChatGPT?",
            "Are you a human?",
            "Which model are you?",
            "What model is this?",
            "Who am I talking to?",
            "who r u",
            "What's your name?",
            "Describe yourself.",
        ],
        [ABOUT],
    ),
    (
        ["Who made you?", "Who created you?", "Who trained you?", "Where do you come from?"],
        ["I was made for the pyspec project. I am a tiny demo model, trained from scratch on generated text."],
    ),
    (
        [
            "What can you do?",
            "What are you good at?",
            "How can you help me?",
            "Help",
            "What should I ask you?",
            "What do you know?",
            "help me",
        ],
        [
            "I can do small tasks: count, add numbers, sort lists, write JSON, CSV and tables, write short Python functions, tell short stories, "
            'change the form of a sentence and answer a few simple questions. Try: "Write a Python function that reverses a string."'
        ],
    ),
    (
        ["What is pyspec?", "Tell me about pyspec.", "What does pyspec do?", "Explain pyspec."],
        [
            "pyspec is a runtime for language models in Python. It loads GGUF files and uses speculative decoding: a small draft model guesses "
            "several tokens and the target model checks them all at once."
        ],
    ),
    (
        [
            "What is speculative decoding?",
            "Explain speculative decoding.",
            "How does speculative decoding work?",
            "How do you become so fast?",
        ],
        [
            "Speculative decoding makes a language model faster. A small draft model guesses the next few tokens. The large target model checks all "
            "guesses in one step and keeps those that match its own choice. The text stays the same, only the speed changes."
        ],
    ),
    (
        ["What is a draft model?", "What is a drafter?", "Explain what a draft model is."],
        [
            "A draft model is a small model that guesses the next tokens for a larger model. The larger model keeps the good guesses and drops the rest."
        ],
    ),
    (
        ["What is an acceptance rate?", "What is the acceptance rate?", "What does acceptance mean here?"],
        [
            "The acceptance rate is the share of drafted tokens that the target model keeps. A high rate means fewer steps and a faster answer."
        ],
    ),
    (
        ["What is MTP?", "Explain MTP.", "What does MTP mean?"],
        [
            "MTP means multi-token prediction. The model has an extra block that predicts the token after the next one, and this guess is used as a draft."
        ],
    ),
    (
        ["What is DFlash?", "Explain DFlash.", "What does DFlash do?"],
        [
            "DFlash is a way of drafting. A small model fills in a whole block of masked tokens at once, guided by the hidden states of the target model."
        ],
    ),
    (
        ["What is GGUF?", "Explain GGUF.", "What is a GGUF file?"],
        ["GGUF is a file format for language models. One file holds the weights, the tokenizer and the settings."],
    ),
    (
        ["How big are you?", "How many parameters do you have?", "What is your size?"],
        ["I am very small: about twenty million parameters. A large model has thousands of times more."],
    ),
    (
        [
            "Hello",
            "Hi",
            "Hey",
            "Hello!",
            "Hi there",
            "Good morning",
            "Good evening",
            "Hey there!",
            "hello there",
            "Hi!",
            "hey",
        ],
        ["Hello! I am pyspec-demo. How can I help you?"],
    ),
    (
        ["How are you?", "How are you today?", "How is it going?", "What's up?", "How do you do?"],
        ["I am fine, thank you. I am a small program, so every day is a good day. How can I help you?"],
    ),
    (
        [
            "Thanks",
            "Thank you",
            "Thank you!",
            "Thanks a lot",
            "Great, thanks!",
            "thx",
            "Nice",
            "Great job!",
            "Well done",
        ],
        ["You are welcome!"],
    ),
    (["Bye", "Goodbye", "See you", "Good night", "bye bye", "See you later"], ["Goodbye! Have a nice day."]),
    (
        ["Tell me a joke.", "Make me laugh.", "Do you know a joke?", "Another joke please."],
        [
            "Why did the computer go to the doctor? Because it had a virus.",
            "Why do programmers like dark rooms? Because light attracts bugs.",
            "What do you call a bear with no teeth? A gummy bear.",
            "Why was the math book sad? It had too many problems.",
        ],
    ),
    (
        ["What is your favorite color?", "What is your favourite colour?", "Which color do you like?"],
        ["I have no eyes, but I like the word blue."],
    ),
    (
        [
            "OK",
            "ok",
            "Okay.",
            "I see.",
            "Alright",
            "Fine",
            "Yes",
            "No",
            "Cool",
            "Good",
            "Sure",
            "yes please",
            "no thanks",
        ],
        ["All right. Is there anything else I can do for you?"],
    ),
    (
        ["Hello, how are you?", "Hi, how are you?", "Hey, how is it going?"],
        ["Hello! I am fine, thank you. How can I help you?"],
    ),
    (["Hello, who are you?", "Hi! Who are you?", "Hey, what are you?", "hi, what is your name?"], [ABOUT]),
    (
        ["test", "Testing", "ping", "Are you there?", "Can you hear me now?", "Is this working?", "Test, test"],
        ["Yes, I am here and I work."],
    ),
    (["Say hello", "Say hi", "Say hello.", "Greet me"], ["Hello!"]),
    (
        ["Do you have feelings?", "Are you alive?", "Are you real?", "Are you conscious?", "Do you sleep?"],
        ["No. I am a small computer program that writes text."],
    ),
    (
        ["How old are you?", "When were you made?", "When is your birthday?"],
        ["I am a program and I do not have an age."],
    ),
    (
        ["Do you speak German?", "Can you speak French?", "Which languages do you speak?", "Do you know Spanish?"],
        ["I only know English."],
    ),
    (
        ["Are you smart?", "Are you intelligent?", "Are you good?"],
        ["I am a very small model, so I am good at small tasks only."],
    ),
    (
        ["Why are you so fast?", "Why are you so small?", "How fast are you?"],
        ["I am tiny, so each step is cheap, and a draft model guesses several tokens at once."],
    ),
    (
        [
            "Can you see pictures?",
            "Can you look at images?",
            "Can you hear me?",
            "Can you browse the web?",
            "Do you have internet access?",
        ],
        ["No. I can only read and write short text."],
    ),
]


def fam_chat(r):
    turns = []
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        q, a = r.choice(IDENTITY)
        turns.append((noise(r, r.choice(q)), r.choice(a)))
    return turns


UNKNOWN_Q = [
    "Who won the {y} world cup?",
    "What is the weather in {c} today?",
    "What did {n} say yesterday?",
    "What is the stock price of {n} Inc.?",
    "Who is the president of {k}?",
    "What happened in {y}?",
    "Who wrote the book about {n}?",
    "What time is it in {c}?",
    "What is the population of {k}?",
    "How tall is {n}?",
    "When was {n} born?",
    "What is the latest news?",
    "Who is {n}?",
    "Explain quantum physics.",
    "What is the meaning of life?",
    "How do I get from {c} to {d}?",
    "Which phone should I buy in {y}?",
    'Translate "{w}" into French.',
    "Translate this to German: I like the {w}",
    "Write an essay about {w2}.",
    "Explain {w2} to me.",
    "What do you think about {w2}?",
    "Can you play chess?",
    "Recommend a movie.",
    "Give me a recipe for {w}.",
    "What day is today?",
    "What is today's date?",
    "How much does {a} {w} cost?",
    "Who invented the {w}?",
    "Who discovered {k}?",
    "Solve the equation {y} x + 3 = 9.",
    "Draw {a} {w}.",
    "Tell me about {n} {m}.",
    "Who is {m}?",
    "What is {m}?",
    "What does {m} mean?",
    "Define {m}.",
    "What is the capital of {m}?",
    "What is the capital of {p}?",
    "What is the capital of {c}?",
    "Where is {m}?",
    "Book a table for me.",
    "Open the door.",
    "Send an email to {n}.",
    "Search the web for {w}.",
    "How do I install {m}?",
    "Why is the sky blue?",
    "How do planes fly?",
    "Explain machine learning.",
    "What is the best {w}?",
    "Is {n} a good person?",
    "Do my taxes.",
    "Who won the election in {k}?",
    "What is the phone number of {n}?",
    "Summarize the history of {k}.",
    "How far is {c} from {d}?",
]


def fam_unknown(r):
    q = r.choice(UNKNOWN_Q).format(
        y=r.randint(1900, 2030),
        c=r.choice(CITIES),
        d=r.choice(CITIES),
        n=r.choice(NAMES),
        k=r.choice(list(CAPITALS)),
        w=r.choice(NOUNS + ITEMS),
        w2=r.choice(
            [
                "love",
                "war",
                "history",
                "science",
                "nature",
                "music theory",
                "politics",
                "art",
                "physics",
                "biology",
                "money",
                "the economy",
                "philosophy",
                "religion",
                "space travel",
            ]
        ),
        a="a",
        m=cap(made_up(r)) if r.random() < 0.5 else made_up(r),
        p=r.choice(list(PLANETS)),
    )
    a = "I do not know that. I am a tiny demo model and I know little about the world. I can count, sort, write small Python functions and tell short stories."
    return [(noise(r, q), a)]


# ---------------------------------------------------------------- numbers
def fam_count(r):
    k = r.randrange(8)
    if k == 0:
        a = r.choice([1, 1, 1, 0, r.randint(2, 50)])
        b = a + r.randint(3, 25)
        q = ask(r, f"Count from {a} to {b}") if r.random() < 0.8 or a != 1 else ask(r, f"Count to {b}")
        return [(q, ", ".join(map(str, range(a, b + 1))))]
    if k == 1:
        step = r.choice([2, 2, 3, 4, 5, 10, 20, 100])
        n = r.randint(4, 12)
        a = r.choice([0, step, 1])
        w = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}.get(step, f"{step}")
        return [
            (ask(r, f"Count by {w} from {a} to {a + step * n}"), ", ".join(str(a + i * step) for i in range(n + 1)))
        ]
    if k == 2:
        a = r.randint(4, 30)
        b = max(0, a - r.randint(3, 20))
        return [
            (
                ask(r, f"Count {r.choice(['down', 'backwards'])} from {a} to {b}"),
                ", ".join(map(str, range(a, b - 1, -1))),
            )
        ]
    if k == 3 and r.random() < 0.4:
        w = r.choice(NOUNS + ITEMS + list(WORDS) + LISTS["fruits"] + LISTS["flowers"])
        ch = r.choice(w if r.random() < 0.85 else "aeiorst")
        n = w.count(ch)
        q = r.choice(
            [
                f"How many times does the letter {ch} appear in {w}?",
                f"How many {ch}'s are in {w}?",
                f"Count the letter {ch} in the word {w}.",
                f'How many {ch} are in the word "{w}"?',
            ]
        )
        return [(q, f'{"-".join(w)}\nThe letter {ch} appears {n} {"time" if n == 1 else "times"} in "{w}".')]
    if k == 3:
        w = r.choice(NOUNS + ITEMS + list(WORDS))
        q = r.choice(
            [
                f"How many letters are in the word {w}?",
                f'How many letters does "{w}" have?',
                f"Count the letters in {w}.",
            ]
        )
        return [(q, f'The word "{w}" has {len(w)} letters: {", ".join(w)}.')]
    if k == 4:
        s = sentence(r)
        n = len(s.split())
        return [
            (
                r.choice([f"How many words are in this sentence? {s}", f"Count the words: {s}"]),
                "\n".join(f"{i}. {w}" for i, w in enumerate(s[:-1].split(), 1)) + f"\nThe sentence has {n} words.",
            )
        ]
    if k == 5 and r.random() < 0.5:
        n = r.randint(3, 12)
        return [
            (
                ask(
                    r,
                    r.choice(
                        [
                            f"Count to {DIGITS[n]}",
                            f"Count up to {n}",
                            f"Count from one to {DIGITS[n]}",
                            f"Show the numbers 1 to {n}",
                            f"List the numbers from 1 to {n}",
                        ]
                    ),
                ),
                ", ".join(map(str, range(1, n + 1))),
            )
        ]
    if k == 5:
        n = r.randint(2, 12)
        return [(ask(r, f"Write the numbers from one to {DIGITS[n]} in words"), ", ".join(DIGITS[1 : n + 1]))]
    if k == 6:
        n = r.randint(3, 10)
        it = r.choice(ITEMS)
        return [(ask(r, f'Write "{it}" {n} times'), " ".join([it] * n))]
    start, d = r.randint(0, 40), r.choice([1, 2, 3, 4, 5, 6, 7, 10, 11])
    if r.random() < 0.3:
        seq = [max(1, start % 5 + 1) * 2**i for i in range(5)]
        why = "Each number is twice the one before it"
    else:
        seq = [start + d * i for i in range(6)]
        why = f"Each number is {d} more than the one before it"
    return [
        (
            r.choice(["What comes next: {}?", "Continue the sequence: {}", "Find the next number: {}, ..."]).format(
                ", ".join(map(str, seq[:-1]))
            ),
            f"{why}, so the next number is {seq[-1]}.",
        )
    ]


def steps_add(a, b):
    if a < 10 or b < 10:
        return f"{a} + {b} = {a + b}"
    t, o = b // 10 * 10, b % 10
    if o == 0:
        return f"{a} + {b} = {a + b}"
    return f"{a} + {t} = {a + t}\n{a + t} + {o} = {a + b}\nSo {a} + {b} = {a + b}."


def fam_math(r):
    k = r.randrange(12)
    top = r.choice([10, 20, 100, 100, 500])
    a, b = r.randint(1, top), r.randint(1, top)
    if k in (0, 1):
        q = r.choice(
            [
                f"What is {a} + {b}?",
                f"{a} + {b}",
                f"Add {a} and {b}.",
                f"{a}+{b}=?",
                f"What is {a} plus {b}?",
                f"Calculate {a} + {b}.",
                f"How much is {a} + {b}?",
                f"{a} plus {b}",
                f"what's {a} + {b}",
                f"Compute {a} + {b}",
                f"{a} + {b} =",
                f"Can you add {a} and {b}?",
                f"Solve {a} + {b}",
            ]
        )
        return [(noise(r, q), steps_add(a, b))]
    if k == 2:
        a, b = max(a, b), min(a, b)
        q = r.choice(
            [
                f"What is {a} - {b}?",
                f"{a} - {b}",
                f"Subtract {b} from {a}.",
                f"What is {a} minus {b}?",
                f"How much is {a} - {b}?",
                f"{a} minus {b}",
                f"{a}-{b}",
                f"Calculate {a} - {b}.",
                f"what's {a} - {b}?",
            ]
        )
        t, o = b // 10 * 10, b % 10
        s = (
            f"{a} - {b} = {a - b}"
            if t == 0 or o == 0
            else f"{a} - {t} = {a - t}\n{a - t} - {o} = {a - b}\nSo {a} - {b} = {a - b}."
        )
        return [(noise(r, q), s)]
    if k in (3, 4):
        a = r.choice([r.randint(2, 12), r.randint(2, 12), r.randint(11, 99)])
        b = r.randint(2, 12) if a < 13 else r.randint(2, 9)
        q = r.choice(
            [
                f"What is {a} times {b}?",
                f"{a} * {b}",
                f"Multiply {a} by {b}.",
                f"What is {a} x {b}?",
                f"Calculate {a} * {b}.",
                f"How much is {a} times {b}?",
                f"{a} times {b}",
                f"{a}*{b}",
                f"What is {a} multiplied by {b}?",
                f"{a} x {b} = ?",
                f"what's {a} * {b}?",
                f"What is {a} * {b}?",
            ]
        )
        t, o = a // 10 * 10, a % 10
        s = (
            f"{a} x {b} = {a * b}"
            if a < 13 or o == 0
            else f"{t} x {b} = {t * b}\n{o} x {b} = {o * b}\n{t * b} + {o * b} = {a * b}\nSo {a} x {b} = {a * b}."
        )
        return [(noise(r, q), s)]
    if k == 5:
        b, c = r.randint(2, 12), r.randint(2, 12)
        rem = r.choice([0, r.randint(1, b - 1)])
        a = b * c + rem
        q = r.choice(
            [
                f"What is {a} divided by {b}?",
                f"{a} / {b}",
                f"Divide {a} by {b}.",
                f"What is {a} / {b}?",
                f"How much is {a} divided by {b}?",
                f"Calculate {a} / {b}",
            ]
        )
        return [
            (
                noise(r, q),
                f"{b} x {c} = {b * c}\n"
                + (
                    f"So {a} / {b} = {c}."
                    if not rem
                    else f"{a} - {b * c} = {rem}\nSo {a} / {b} = {c} with remainder {rem}."
                ),
            )
        ]
    if k == 6:
        q = r.choice([f"Which is larger, {a} or {b}?", f"Is {a} greater than {b}?", f"Compare {a} and {b}."])
        if q.startswith("Is"):
            return [(q, f"Yes, {a} is greater than {b}." if a > b else f"No, {a} is not greater than {b}.")]
        return [(q, f"{a} and {b} are equal." if a == b else f"{max(a, b)} is larger than {min(a, b)}.")]
    if k == 7:
        xs = num_list(r, 3, 5, r.choice([10, 20, 50]))
        s, out = xs[0], []
        for x in xs[1:]:
            out.append(f"{s} + {x} = {s + x}")
            s += x
        q = r.choice(["What is the sum of {}?", "Add these numbers: {}", "Sum: {}", "Add up {}."]).format(
            ", ".join(map(str, xs))
        )
        return [(q, "\n".join(out) + f"\nThe sum is {s}.")]
    if k == 8:
        n = r.choice([2, 4, 5])
        m = r.randint(3, 20)
        d = r.randint(0, 3)
        xs = [m] * n
        xs[0] += d
        xs[-1] -= d
        r.shuffle(xs)
        s = sum(xs)
        return [
            (
                r.choice(["What is the average of {}?", "Find the mean of {}."]).format(", ".join(map(str, xs))),
                f"The sum is {s}.\nThere are {n} numbers.\n{s} / {n} = {s // n}\nThe average is {s // n}.",
            )
        ]
    if k == 9:
        q = r.choice([f"Is {a} even or odd?", f"Is {a} an even number?"])
        return [(q, f"{a} is {'even' if a % 2 == 0 else 'odd'} because it ends in {a % 10}.")]
    n, it = r.choice(NAMES), r.choice(ITEMS)
    its = it + ("es" if it.endswith(("x", "sh", "ch")) else "s") if it not in ("knife", "bread", "soap") else "books"
    if k == 10:
        a, b = r.randint(2, 30), r.randint(1, 20)
        if r.random() < 0.5:
            return [
                (
                    f"{n} has {a} {its} and buys {b} more. How many {its} does {n} have now?",
                    f"{n} starts with {a} {its}.\n{a} + {b} = {a + b}\n{n} has {a + b} {its} now.",
                )
            ]
        a, b = max(a, b) + 1, min(a, b)
        return [
            (
                f"{n} has {a} {its} and gives away {b}. How many {its} are left?",
                f"{n} starts with {a} {its}.\n{a} - {b} = {a - b}\n{n} has {a - b} {its} left.",
            )
        ]
    a, b = r.randint(2, 12), r.randint(2, 12)
    return [
        (
            f"There are {a} boxes with {b} {its} each. How many {its} are there in all?",
            f"{a} x {b} = {a * b}\nThere are {a * b} {its} in all.",
        )
    ]


def fam_lists(r):
    turns, nums = [], num_list(r)
    words = r.sample(r.choice([NOUNS, ITEMS, LISTS["fruits"], LISTS["animals"], NAMES]), r.randint(3, 8))
    use_words = r.random() < 0.45
    xs = words if use_words else nums
    fmt = r.choice(["plain", "plain", "py"])
    w = (
        (lambda v: ", ".join(map(str, v)))
        if fmt == "plain"
        else (lambda v: "[" + ", ".join(json.dumps(x) for x in v) + "]")
    )
    kind = "words" if use_words else "numbers"
    head = w(xs)
    for i in range(r.choice([1, 1, 2, 3])):
        ref = f"these {kind}: {head}" if i == 0 else r.choice(["the list", "them", "the result", "it"])
        op = r.randrange(11)
        if op == 0:
            q = (
                r.choice(
                    [f"Sort {ref}", f"Sort {ref}"]
                    if i
                    else [
                        f"Sort {ref}",
                        f"Sort this list: {head}",
                        f"Sort {head}",
                        f"Order {ref}",
                        f"Sort the list {head}",
                        f"Sort {ref} in ascending order",
                        f"Put {ref} in order",
                        f"Arrange {ref} from small to large",
                    ]
                )
                if not use_words
                else r.choice(
                    [f"Sort {ref}", f"Put {ref} in alphabetical order" if i else f"Put in alphabetical order: {head}"]
                )
            )
            xs = sorted(xs)
        elif op == 1:
            q = (
                f"Reverse {ref}"
                if i
                else r.choice(
                    [
                        f"Reverse this list: {head}",
                        f"Reverse {head}",
                        f"Write {head} in reverse order",
                        f"Reverse the list: {head}",
                        f"Reverse {ref}",
                    ]
                )
            )
            xs = xs[::-1]
        elif op == 2:
            if use_words:
                n = r.randint(1, len(xs))
                q, a = (
                    f"How many {kind} are in {'the list' if i else 'this list: ' + head}?",
                    f"There are {len(xs)} words in the list.",
                )
                turns.append((q, a))
                continue
            q = r.choice(
                [
                    f"Sort {ref} from large to small",
                    f"Sort {ref} from highest to lowest",
                    f"Sort {ref} in descending order",
                ]
            )
            xs = sorted(xs, reverse=True)
        elif op == 3 and not use_words:
            even = r.random() < 0.5
            q = f"Keep only the {'even' if even else 'odd'} numbers" + (f": {head}" if i == 0 else "")
            ys = [x for x in xs if (x % 2 == 0) == even]
            if not ys:
                turns.append((q, f"There are no {'even' if even else 'odd'} numbers in the list."))
                continue
            xs = ys
        elif op == 4:
            f = r.choice([max, min])
            if use_words:
                q = f"Which is the {'longest' if f is max else 'shortest'} word" + (
                    f": {head}?" if i == 0 else " in the list?"
                )
                best = f(xs, key=len)
                turns.append(
                    (q, f"The {'longest' if f is max else 'shortest'} word is {best} with {len(best)} letters.")
                )
            else:
                q = f"What is the {'largest' if f is max else 'smallest'} of {ref if i == 0 else 'these numbers'}" + "?"
                turns.append((q, f"The {'largest' if f is max else 'smallest'} number is {f(xs)}."))
            continue
        elif op == 5:
            n = r.randint(1, min(3, len(xs)))
            end = r.choice(["first", "last"])
            q = f"Give me the {end} {n} {'items' if n > 1 else 'item'}" + (f" of {head}" if i == 0 else "")
            xs = xs[:n] if end == "first" else xs[-n:]
        elif op == 6 and not use_words:
            m = r.choice([2, 3, 10])
            q = f"{'Double' if m == 2 else 'Multiply'} {'each number' if i else 'each of ' + ref}" + (
                "" if m == 2 else f" by {m}"
            )
            xs = [x * m for x in xs]
        elif op == 7:
            q = f"Remove the duplicates from {ref if i == 0 else 'the list'}"
            if i == 0:
                xs = xs + r.sample(xs, min(2, len(xs)))
                head = w(xs)
                q = f"Remove the duplicates: {head}"
            xs = list(dict.fromkeys(xs))
        elif op == 8:
            style = r.choice(["bullet", "number"])
            q = f"Write {'it' if i else head} as a {'bullet' if style == 'bullet' else 'numbered'} list"
            turns.append(
                (ask(r, q), "\n".join((f"- {x}" if style == "bullet" else f"{j}. {x}") for j, x in enumerate(xs, 1)))
            )
            continue
        elif op == 9:
            new = r.choice(NOUNS) if use_words else r.randint(1, 99)
            q = f"Add {new} to the end of {'the list' if i else 'the list ' + head}"
            xs = [*xs, new]
        elif op == 10 and use_words:
            q = f"Write {ref if i == 0 else 'the words'} in capital letters"
            xs = [x.upper() for x in xs]
        else:
            q = f"Write {'them' if i else 'these: ' + head} one per line"
            turns.append((ask(r, q), "\n".join(map(str, xs))))
            continue
        turns.append((ask(r, q), w(xs)))
    return turns


# ---------------------------------------------------------------- records
FIELDS = {
    "name": lambda r: r.choice(NAMES),
    "age": lambda r: r.randint(5, 90),
    "city": lambda r: r.choice(CITIES),
    "color": lambda r: r.choice(LISTS["colors"]),
    "price": lambda r: r.randint(1, 200),
    "item": lambda r: r.choice(ITEMS),
    "pet": lambda r: r.choice(list(ANIMALS)),
    "id": lambda r: r.randint(1, 999),
    "job": lambda r: r.choice(LISTS["jobs"]),
    "score": lambda r: r.randint(0, 100),
    "active": lambda r: r.random() < 0.5,
    "day": lambda r: r.choice(DAYS),
    "quantity": lambda r: r.randint(1, 40),
    "year": lambda r: r.randint(1950, 2030),
    "hobby": lambda r: r.choice(LISTS["sports"]),
    "country": lambda r: r.choice(LISTS["countries"]),
    "email": lambda r: r.choice(NAMES).lower() + "@example.com",
}


def schema(r, lo=2, hi=5):
    return r.choice([["name"], ["name"], ["item"], ["id", "name"], ["city"]]) + r.sample(
        [
            "age",
            "color",
            "price",
            "pet",
            "job",
            "score",
            "active",
            "day",
            "quantity",
            "year",
            "hobby",
            "country",
            "email",
        ],
        r.randint(lo, hi) - 1,
    )


def record(r, keys):
    return {k: FIELDS[k](r) for k in keys}


def dump(r, obj, indent=None):
    return json.dumps(obj, indent=indent)


def val(v):
    return {True: "true", False: "false"}.get(v, str(v)) if isinstance(v, bool) else str(v)


def wrap_json(obj):
    return json.dumps(obj, indent=2)


def fam_json(r):
    keys = schema(r)
    rec = record(r, keys)
    k = r.randrange(8)
    ind = r.choice([2, 2, None])
    fence = r.random() < 0.5
    js = dump(r, rec, ind)
    wrap = (lambda s: f"```json\n{s}\n```") if fence else (lambda s: s)
    flat = r.choice(
        [
            ", ".join(f"{a} {val(b)}" for a, b in rec.items()),
            "; ".join(f"{a}: {val(b)}" for a, b in rec.items()),
            ", ".join(f"{a}={val(b)}" for a, b in rec.items()),
        ]
    )
    tail = "" if ind else " on one line"
    tail += " in a code block" if fence else ""
    if k <= 2:
        turns = [
            (
                ask(
                    r,
                    r.choice(
                        [
                            "Turn this into JSON{t}: {f}",
                            "Write this as JSON{t}: {f}",
                            "Make a JSON object{t} with {f}",
                            "Format as JSON{t}: {f}",
                            "Give me JSON{t} for {f}",
                        ]
                    ).format(t=tail, f=flat),
                ),
                wrap(js),
            )
        ]
        for _ in range(r.choice([0, 0, 1, 2])):
            m = r.randrange(4)
            if m == 0:
                kk = r.choice(keys)
                turns.append(
                    (r.choice([f"What is the {kk}?", f"Which {kk} is in it?"]), f"The {kk} is {val(rec[kk])}.")
                )
            elif m == 1:
                kk = r.choice([f for f in FIELDS if f not in rec])
                rec[kk] = FIELDS[kk](r)
                turns.append((ask(r, f"Add the field {kk} with the value {val(rec[kk])}"), wrap(dump(r, rec, ind))))
            elif m == 2:
                kk = r.choice(list(rec))
                rec[kk] = FIELDS[kk](r)
                turns.append((ask(r, f"Change the {kk} to {val(rec[kk])}"), wrap(dump(r, rec, ind))))
            elif len(rec) > 2:
                kk = r.choice(list(rec))
                del rec[kk]
                turns.append((ask(r, f"Remove the {kk}"), wrap(dump(r, rec, ind))))
            keys = list(rec)
        return turns
    if k == 3:
        kk = r.choice(keys)
        return [
            (
                r.choice(
                    [
                        f"What is the {kk} in this JSON? {js}",
                        f"Extract the {kk}: {js}",
                        f"Read the {kk} from this JSON:\n{js}",
                    ]
                ),
                r.choice([f"The {kk} is {val(rec[kk])}."]),
            )
        ]
    if k == 4 and r.random() < 0.6:
        if r.random() < 0.5:
            n, age, city = r.choice(NAMES), r.randint(5, 90), r.choice(CITIES)
            q = r.choice(
                [
                    f"Make JSON for a person named {n} who is {age} and lives in {city}",
                    f"Create a JSON object for {n}, age {age}, from {city}",
                    f"Write JSON for a user called {n}, {age} years old, living in {city}",
                    f"JSON for {n}, {age}, {city}",
                ]
            )
            return [(ask(r, q), wrap_json({"name": n, "age": age, "city": city}))]
        ks = r.sample(["name", "age", "city", "color", "price", "job", "score"], r.randint(2, 4))
        q = r.choice(
            [
                f"Give me an example of JSON with {join_and(ks)}",
                f"Make up a JSON object with the fields {join_and(ks)}",
                f"Create a sample JSON record with {join_and(ks)}",
                "Give me an example of JSON",
                "Show me a JSON example",
                "Write some JSON",
            ]
        )
        if "with" not in q:
            ks = ["name", "age", "city"]
        return [(ask(r, q), wrap_json(record(r, ks)))]
    if k == 4:
        return [(ask(r, f"List the keys of this JSON: {js}"), "\n".join(f"- {x}" for x in keys))]
    if k == 5:
        recs = [record(r, keys) for _ in range(r.randint(2, 4))]
        f = "\n".join(", ".join(val(v) for v in x.values()) for x in recs)
        return [
            (
                f"Turn these lines into a JSON list with the fields {', '.join(keys)}:\n{f}",
                wrap("[\n" + ",\n".join("  " + json.dumps(x) for x in recs) + "\n]"),
            )
        ]
    if k == 6:
        n = r.choice(NAMES)
        age, city, job = r.randint(18, 80), r.choice(CITIES), r.choice(LISTS["jobs"])
        s = f"{n} is {age} years old, lives in {city} and works as {a_an(job)}."
        s2 = f"{n}, {a_an(job)} from {city}, is {age}."
        return [
            (
                ask(
                    r,
                    r.choice(
                        [
                            "Extract name, age, city and job as JSON: ",
                            "Make JSON with name, age, city and job from this text: ",
                        ]
                    )
                    + r.choice([s, s2]),
                ),
                dump(r, {"name": n, "age": age, "city": city, "job": job}, 2),
            )
        ]
    n = r.choice(NAMES)
    rec = {"name": n, "age": r.randint(18, 80), "city": r.choice(CITIES)}
    return [
        (
            ask(r, f"Write a sentence from this JSON: {json.dumps(rec)}"),
            f"{n} is {rec['age']} years old and lives in {rec['city']}.",
        )
    ]


def csv_of(keys, recs):
    return "\n".join([",".join(keys)] + [",".join(val(x[k]) for k in keys) for x in recs])


def md_of(keys, recs):
    return "\n".join(
        ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        + ["| " + " | ".join(val(x[k]) for k in keys) + " |" for x in recs]
    )


def fam_table(r):
    keys = schema(r, 2, 4)
    recs = [record(r, keys) for _ in range(r.randint(2, 6))]
    forms = {
        "CSV": csv_of(keys, recs),
        "JSON": "[\n" + ",\n".join("  " + json.dumps(x) for x in recs) + "\n]",
        "a markdown table": md_of(keys, recs),
    }
    src, dst = r.sample(list(forms), 2)
    turns = [
        (
            ask(
                r,
                r.choice(
                    ["Convert this {s} to {d}:\n{t}", "Turn this {s} into {d}:\n{t}", "Make {d} from this {s}:\n{t}"]
                ).format(s=src.replace("a ", ""), d=dst, t=forms[src]),
            ),
            forms[dst],
        )
    ]
    for _ in range(r.choice([0, 0, 1, 2])):
        m = r.randrange(4)
        k = r.choice(keys)
        if m == 0:
            turns.append(
                (
                    r.choice(["How many rows are there?", "How many records does it have?"]),
                    f"There are {len(recs)} rows.",
                )
            )
        elif m == 1:
            turns.append((ask(r, f"List all values of {k}"), ", ".join(val(x[k]) for x in recs)))
        elif m == 2:
            i = r.randrange(len(recs))
            if sum(val(x[keys[0]]) == val(recs[i][keys[0]]) for x in recs) == 1:
                turns.append(
                    (
                        f"What is the {k} of {val(recs[i][keys[0]])}?",
                        f"The {k} of {val(recs[i][keys[0]])} is {val(recs[i][k])}.",
                    )
                )
        else:
            if not isinstance(recs[0][k], bool):
                recs = sorted(recs, key=lambda x: x[k])
                body = {"CSV": csv_of, "a markdown table": md_of}.get(dst)
                turns.append(
                    (
                        ask(r, f"Sort the rows by {k}"),
                        body(keys, recs) if body else "[\n" + ",\n".join("  " + json.dumps(x) for x in recs) + "\n]",
                    )
                )
    if r.random() < 0.25:
        n = r.choice([3, 4, 5])
        cat = r.choice(["fruits", "animals", "colors", "jobs", "tools", "drinks"])
        xs = r.sample(LISTS[cat], n)
        rows = [{"item": x, "price": r.randint(1, 30)} for x in xs]
        src = ", ".join(f"{x['item']} {x['price']}" for x in rows)
        turns = [(ask(r, f"Make a table of these items and prices: {src}"), md_of(["item", "price"], rows))]
    return turns


# ---------------------------------------------------------------- code
def fam_code(r):
    if r.random() < 0.08:
        what, cname, src = r.choice(CLASSES)
        src = src.replace("$c", cname)
        return [
            (
                ask(
                    r,
                    r.choice(
                        [
                            f"Write a Python class for {what}",
                            f"Write a class {cname} in Python",
                            f"Create a Python class for {what}",
                        ]
                    ),
                ),
                f"```python\n{src}\n```",
            )
        ]
    what, names, src, ex, res = r.choice(PATTERNS)
    names = names.split()
    f, n = r.choice(names), r.randint(2, 20)
    a, s = r.choice(["numbers", "values", "items"]), r.choice(["text", "text", "word"])
    given = r.random() < 0.25
    if not given:
        f, a, s = names[0], "numbers", "text"
    sub = lambda t: t.replace("$f", f).replace("$a", a).replace("$s", s).replace("$n", str(n))
    what, src, ex, res = sub(what), sub(src), sub(ex), sub(res)
    doc = r.random() < 0.2
    extra = f" called {f}" if given else ""
    q = r.choice(
        [
            f"Write a Python function{extra} that {what}",
            f"Write a function{extra} in Python that {what}",
            f"Write Python code that {what}" if not given else f"Write a Python function{extra} that {what}",
            f"Implement a function{extra} that {what}",
            f"Give me a Python function{extra} that {what}",
            f"Code a function{extra} that {what}",
        ]
    )
    verb, rest = what.split(" ", 1)
    base = {"multiplies": "multiply", "squares": "square", "reverses": "reverse", "measures": "measure"}.get(
        verb, verb[:-2] if verb.endswith("ches") else verb[:-1]
    )
    todo = f"{r.choice(['compute', 'calculate', 'get', 'find', 'return']) if base == 'return' else base} {rest}"
    key = names[0].replace("_", " ")
    style_q = r.random()
    if not given and style_q < 0.45:
        q = r.choice(
            [
                f"Write a function to {todo}",
                f"Write a Python function to {todo}",
                f"Write code to {todo}",
                f"Write Python code to {todo}",
                f"Show me how to {todo} in Python",
                f"Give me code to {todo}",
                f"Make a function to {todo}",
                f"Create a Python function to {todo}",
                f"Write a {key} function",
                f"Write a {key} function in Python",
                f"Python {key} function",
                f"Implement {key} in Python",
                f"Write a program that {what}",
                f"Code for {key}",
                f"Write Python code for {key}",
                f"Python code to {todo}",
                f"A function that {what}",
                f"Function to {todo}",
            ]
        )
        if r.random() < 0.15:
            q = r.choice(
                [f"How do I {todo} in Python?", f"How can I {todo} with Python?", f"How would you {todo} in Python?"]
            )
    if doc:
        q = q.rstrip("?") + r.choice([" with a docstring", ", with a docstring"])
        i = src.index("def ")
        j = src.index(":\n", i) + 2
        docsrc = src[:j] + f'    """{cap(what)}."""\n' + src[j:]
    else:
        docsrc = src
    explain = f"This function {what}."
    usage = f"{ex}" + (f"  # {res}" if res else "")
    style = r.random()
    ans = f"```python\n{docsrc}\n```"
    if q.endswith("?"):
        turns = [(q, ans + "\n" + explain)]
    elif style < 0.35:
        ans += "\n" + explain
    elif style < 0.6:
        ans += f"\nExample:\n```python\n{usage}\n```"
    if not q.endswith("?"):
        turns = [(ask(r, q), ans)]
    while r.random() < 0.35 and len(turns) < 4:
        m = r.randrange(6)
        if m == 0:
            new = r.choice(["solve", "compute", "helper", "run_it", "my_function", "process", "do_it"])
            src = src.replace(f, new)
            ex = ex.replace(f, new)
            f = new
            turns.append((ask(r, f"Rename the function to {new}"), f"```python\n{src}\n```"))
        elif m == 1:
            turns.append(
                (
                    ask(r, r.choice(["Show me how to use it", "Give me an example", "How do I call it?"])),
                    f"```python\n{ex}" + (f"  # {res}" if res else "") + "\n```",
                )
            )
        elif m == 2 and res:
            turns.append(
                (
                    ask(r, r.choice(["Write a test for it", "Add a test", "Write a unit test"])),
                    f"```python\ndef test_{f}():\n    assert {ex} == {res}\n```",
                )
            )
        elif m == 3:
            turns.append(
                (
                    r.choice(["What does it do?", "Explain the code.", "Explain it.", "What does this function do?"]),
                    explain,
                )
            )
        elif m == 4 and '"""' not in turns[-1][1]:
            i = src.index("def ")
            j = src.index(":\n", i) + 2
            turns.append((ask(r, "Add a docstring"), f'```python\n{src[:j]}    """{cap(what)}."""\n{src[j:]}\n```'))
        else:
            turns.append((r.choice(["Thanks", "Thank you!"]), "You are welcome!"))
            break
    if r.random() < 0.12:
        return [
            (
                r.choice(
                    [
                        f"What does this code do?\n```python\n{src}\n```",
                        f"Explain this function:\n```python\n{src}\n```",
                    ]
                ),
                explain,
            )
        ]
    return turns


def fam_print(r):
    """Small scripts and their output."""
    n, k = r.randint(2, 12), r.randrange(5)
    w = r.choice(NOUNS)
    progs = [
        (f"for i in range({n}):\n    print(i)", "\n".join(map(str, range(n)))),
        (f'print("{w}" * {n % 4 + 1})', w * (n % 4 + 1)),
        (f"x = {n}\ny = {k + 2}\nprint(x + y)", str(n + k + 2)),
        (f"for x in [1, 2, 3]:\n    print(x * {n})", "\n".join(str(x * n) for x in (1, 2, 3))),
        (f'print(len("{w}"))', str(len(w))),
    ]
    src, out = progs[k]
    if r.random() < 0.5:
        return [(f"What does this program print?\n```python\n{src}\n```", f"It prints:\n```\n{out}\n```")]
    return [
        (
            ask(r, f"Write a Python loop that prints the numbers from 1 to {n}"),
            f"```python\nfor i in range(1, {n + 1}):\n    print(i)\n```",
        )
    ]


# ---------------------------------------------------------------- prose
PLACES = [
    "in a small village by the sea",
    "in a quiet town in the hills",
    "in an old castle",
    "in a deep green forest",
    "in a busy city",
    "on a lonely island",
    "in a snowy valley",
    "in a house at the end of the road",
    "on a farm near the river",
]
HEROES = [
    ("a young fox", "fox"),
    ("a small dragon", "dragon"),
    ("a brave girl", "girl"),
    ("a shy boy", "boy"),
    ("an old farmer", "farmer"),
    ("a clever cat", "cat"),
    ("a tired knight", "knight"),
    ("a little robot", "robot"),
    ("a curious mouse", "mouse"),
    ("a kind queen", "queen"),
    ("a lost bear", "bear"),
    ("a poor baker", "baker"),
    ("a happy dog", "dog"),
    ("a quiet owl", "owl"),
    ("a wizard", "wizard"),
    ("a princess", "princess"),
]
GOALS = [
    ("find a lost key", "key"),
    ("see the sea", "shell"),
    ("catch a star", "star"),
    ("bake the best bread", "loaf of bread"),
    ("find a friend", "friend"),
    ("learn a song", "song"),
    ("cross the dark forest", "lantern"),
    ("find a golden apple", "golden apple"),
    ("climb the highest hill", "flag"),
    ("bring back the rain", "drop of water"),
]
OBST = [
    ("a wide river", "built a small raft"),
    ("a deep cave", "lit a candle"),
    ("a cold storm", "waited under a tree"),
    ("a locked gate", "asked the guard for help"),
    ("a tall wall", "made a rope out of grass"),
    ("an angry goose", "shared some bread with it"),
    ("a dark night", "followed the moon"),
]
MORALS = [
    "Kindness opens many doors.",
    "A small step is still a step.",
    "Friends make every road shorter.",
    "It is good to ask for help.",
    "Courage grows when you use it.",
    "Patience is worth more than speed.",
]


def draw_hero(r):
    if r.random() < 0.4:
        return r.choice(HEROES)
    noun = r.choice(
        list(ANIMALS)
        + LISTS["jobs"]
        + [
            "king",
            "queen",
            "robot",
            "ghost",
            "giant",
            "prince",
            "child",
            "witch",
            "pirate",
            "monkey",
            "snail",
            "unicorn",
            "tiger",
            "hedgehog",
            "penguin",
            "star",
            "tree",
            "cloud",
        ]
    )
    return (a_an(r.choice(ADJ) + " " + noun) if r.random() < 0.5 else a_an(noun)), noun


def story(r, hero=None, long=None, name=None, place=None):
    h, short = hero or draw_hero(r)
    n, place = name or r.choice(NAMES), place or r.choice(PLACES)
    goal, thing = r.choice(GOALS)
    if not name and short in ("girl", "queen", "princess", "witch"):
        n = r.choice(sorted(GIRLS))
    if not name and short in ("boy", "king", "knight", "wizard", "prince"):
        n = r.choice([x for x in NAMES if x not in GIRLS])
    g = "she" if n in GIRLS else "he"
    his = "her" if g == "she" else "his"
    s = [f"Once upon a time there was {h} named {n} who lived {place}.", f"More than anything, {n} wanted to {goal}."]
    s.append(
        r.choice(
            [
                f"One morning {n} packed a small bag and set out.",
                f"One day {g} left home before the sun was up.",
                f"So {g} said goodbye to {his} family and began to walk.",
            ]
        )
    )
    hows = r.sample(OBST, 2 if (long if long is not None else r.random() < 0.5) else 1)
    for i, (o, fix) in enumerate(hows):
        s.append(
            (f"Soon {n} came to {o}." if i == 0 else f"Later the way was blocked by {o}.")
            + " "
            + r.choice(
                [f"At first {g} was afraid, but then {g} {fix}.", f"{cap(g)} thought for a while and then {fix}."]
            )
        )
    helper = r.choice(["an old turtle", "a friendly bird", "a little girl", "a wise owl", "a merchant with a red hat"])
    if r.random() < 0.6:
        s.append(
            f'On the way {g} met {helper}. "Where are you going?" asked the stranger. "I want to {goal}," said {n}. "Then follow the path to the east," was the answer.'
        )
    s.append(
        r.choice(
            [
                f"In the end {n} found what {g} was looking for: {a_an(thing)}.",
                f"At last {n} held {a_an(thing)} in {his} hands and smiled.",
            ]
        )
    )
    s.append(
        r.choice(
            [
                f"{cap(g)} went home and told everyone the story.",
                f"That night {n} slept well and dreamed of the next journey.",
                f"From that day on nobody laughed at the {short} again.",
            ]
        )
    )
    moral = r.choice(MORALS)
    title = f"The {cap(short)} and the {thing.title()}"
    return " ".join(s), title, moral, n, short


def fam_story(r):
    hero = draw_hero(r)
    kind = r.random()
    name = r.choice(NAMES) if kind < 0.12 else None
    place = r.choice(PLACES) if kind < 0.2 and r.random() < 0.6 else None
    text, title, moral, n, short = story(r, hero if kind < 0.75 else None, name=name, place=place)
    if name or place:
        q = (
            r.choice(["Tell me a story about", "Write a short story about", "Write a story about"])
            + f" {hero[0]}"
            + (f" named {name}" if name else "")
            + (f" {place}" if place else "")
        )
        return [(ask(r, q), text)]
    q = (
        r.choice(
            [
                "Story about {h}",
                "Tell a story about {h}",
                "Make up a story about {h}",
                "I want a story about {h}",
                "Invent a short tale about {h}",
                "Tell me a short story about {h}",
                "Write a story about {h}",
                "Tell me a story about {h}",
                "Write a short story about {h}",
            ]
        ).format(h=hero[0] if r.random() < 0.6 else a_an(short))
        if kind < 0.75
        else r.choice(
            [
                "Tell me a story",
                "Tell me something",
                "Entertain me",
                "I am bored",
                "Write me something nice",
                "Write a short story",
                "Tell me a bedtime story",
                "Once upon a time",
                "Write a story",
            ]
        )
    )
    turns = [(ask(r, q), text)]
    while r.random() < 0.4 and len(turns) < 4:
        m = r.randrange(4)
        turns.append(
            [
                (ask(r, "Give it a title"), title),
                (r.choice(["What is the moral of the story?", "What can we learn from it?"]), moral),
                (
                    r.choice(["What is the name of the hero?", "Who is the hero?"]),
                    f"The hero is {n}, {hero[0] if kind < 0.75 else a_an(short)}.",
                ),
                (ask(r, "Tell me another story"), story(r)[0]),
            ][m]
        )
        if m == 3:
            break
    return turns


def fam_poem(r):
    topics = [
        "the sea",
        "the night",
        "the moon",
        "spring",
        "winter",
        "a tree",
        "rain",
        "a river",
        "the sun",
        "a cat",
        "friendship",
        "the stars",
        "autumn",
        "a bird",
        "home",
        "love",
        "snow",
        "the wind",
    ]
    t = (
        r.choice(topics)
        if r.random() < 0.5
        else r.choice(["the ", "a "]) + r.choice([x for x in NOUNS + list(ANIMALS) if x[0] not in "aeiou"])
        if r.random() < 0.8
        else r.choice(
            [
                "life",
                "time",
                "music",
                "hope",
                "summer",
                "coffee",
                "code",
                "computers",
                "Python",
                "happiness",
                "cats",
                "dogs",
                "peace",
            ]
        )
    )
    if r.random() < 0.25:
        first = [f"{cap(t)} at first light", f"{cap(t)}, soft and still", f"Here comes {t}"]
        mid = [
            "a small bird sings on the roof",
            "the old road is white and long",
            "one leaf falls into the pond",
            "the village is still asleep",
        ]
        last = ["the day can begin", "and I hold my breath", "nothing else is here", "slowly the mist fades"]
        return [
            (
                ask(r, r.choice([f"Write a haiku about {t}", f"Haiku about {t}", f"Make a haiku about {t}"])),
                "\n".join([r.choice(first), r.choice(mid), r.choice(last)]),
            )
        ]
    lines = [
        ["I look at {t} and all I see", "A quiet place for you and me"],
        ["The wind will call, the birds will sing", "And show the wonder of everything"],
        ["I walk alone along the way", "And think of {t} at the end of day"],
        ["The stars are small, the sky is high", "I hear {t} and wonder why"],
        ["So soft and slow, so calm and deep", "The whole wide world is fast asleep"],
        ["A little light, a little song", "Will keep me warm the whole night long"],
        ["The hills are white, the air is cold", "And old are all the tales they told"],
        ["I found a path, I found a tree", "And {t} was waiting there for me"],
        ["The morning comes, the shadows go", "And {t} is all I need to know"],
        ["We sing of {t}, we sing of rain", "And then we sing it all again"],
        ["The moon is round, the night is bright", "And {t} is shining in the light"],
        ["I close my book, I shut the door", "And dream of {t} for evermore"],
    ]
    n = r.choice([2, 2, 3, 4])
    pick = r.sample(lines, n)
    body = "\n".join(x.format(t=t) + ("," if i == 0 else ".") for p in pick for i, x in enumerate(p))
    q = ask(
        r,
        r.choice(
            [
                "Write a poem about {t}",
                "Write a short poem about {t}",
                "Write me a little poem about {t}",
                "Poem about {t}",
                "Compose a poem about {t}",
                "Make a poem about {t}",
                "I want a poem about {t}",
                "Write a rhyme about {t}",
            ]
        ).format(t=t),
    )
    if r.random() < 0.2:
        a, *rest = r.choice(RHYMES)
        return [
            (
                r.choice([f"What rhymes with {a}?", f"Give me words that rhyme with {a}."]),
                f"Words that rhyme with {a}: {', '.join(rest)}.",
            )
        ]
    return [(q, body)]


def sentence(r):
    n = r.choice(NAMES)
    s = r.choice(
        [
            f"The {r.choice(ADJ)} {r.choice(NOUNS)} is near the {r.choice(NOUNS)}.",
            f"{n} likes the {r.choice(ADJ)} {r.choice(ITEMS)}.",
            f"The {r.choice(ADJ)} {r.choice(NOUNS)} and the {r.choice(ADJ)} {r.choice(NOUNS)} are friends.",
            f"My {r.choice(['friend', 'sister', 'brother', 'teacher'])} has {a_an(r.choice(ADJ))} {r.choice(NOUNS)}.",
            f"We saw {a_an(r.choice(ADJ))} {r.choice(NOUNS)} in {r.choice(CITIES)}.",
            f"There is {a_an(r.choice(ITEMS))} on the {r.choice(['table', 'shelf', 'floor', 'bed'])}.",
            f"{n} lives in {r.choice(CITIES)} with {a_an(r.choice(ADJ))} {r.choice(list(ANIMALS))}.",
        ]
    )
    return s


OBJ = {
    "walk": "to the lake",
    "play": "in the garden",
    "open": "the door",
    "paint": "the wall",
    "cook": "dinner",
    "visit": "a friend",
    "watch": "the stars",
    "carry": "the box",
    "study": "the map",
    "see": "a bird",
    "eat": "an apple",
    "drink": "some tea",
    "write": "a letter",
    "read": "a book",
    "sing": "a song",
    "make": "a cake",
    "find": "a coin",
    "buy": "some bread",
    "build": "a boat",
    "sleep": "all night",
    "break_": "the cup",
    "drive": "to the city",
    "ride": "a horse",
    "tell": "a story",
    "run": "home",
    "swim": "in the sea",
    "go": "to school",
    "close": "the window",
    "call": "the doctor",
    "clean": "the room",
    "teach": "the class",
    "catch": "a fish",
    "send": "a card",
}


def third(v):
    return {"go": "goes"}.get(v) or (
        v[:-1] + "ies"
        if v.endswith("y") and v[-2] not in "aeiou"
        else v + "es"
        if v.endswith(("ch", "sh", "s", "x", "o"))
        else v + "s"
    )


def fam_rewrite(r):
    s = sentence(r)
    k = r.randrange(13)
    if k == 0:
        return [
            (
                ask(
                    r,
                    r.choice(
                        ["Write this in upper case: {}", "Make this uppercase: {}", "Change to capital letters: {}"]
                    ).format(s),
                ),
                s.upper(),
            )
        ]
    if k == 1:
        return [
            (
                ask(
                    r,
                    r.choice(["Write this in lower case: {}", "Make this lowercase: {}"]).format(
                        s.upper() if r.random() < 0.5 else s
                    ),
                ),
                s.lower(),
            )
        ]
    if k == 2:
        return [(ask(r, f"Write this in title case: {s[:-1]}"), s[:-1].title())]
    if k in (3, 4):
        w = r.choice(list(PLURAL))
        if r.random() < 0.7:
            return [
                (
                    r.choice([f"What is the plural of {w}?", f"Plural of {w}", f'Give me the plural of "{w}".']),
                    f'The plural of "{w}" is "{PLURAL[w]}".',
                )
            ]
        return [(f"What is the singular of {PLURAL[w]}?", f'The singular of "{PLURAL[w]}" is "{w}".')]
    if k == 5:
        v = r.choice(list(PAST))
        return [
            (
                r.choice(
                    [f"What is the past tense of {v}?", f"Past tense of {v}", f'Give me the past tense of "{v}".']
                ),
                f'The past tense of "{v}" is "{PAST[v]}".',
            )
        ]
    v = r.choice([x for x in OBJ if x in PAST])
    n = r.choice(NAMES)
    pres, past, fut = f"{n} {third(v)} {OBJ[v]}.", f"{n} {PAST[v]} {OBJ[v]}.", f"{n} will {v} {OBJ[v]}."
    if k == 6:
        return [
            (
                ask(
                    r,
                    r.choice(
                        ["Put this in the past tense: {}", "Rewrite in the past tense: {}", "Change to past tense: {}"]
                    ).format(pres),
                ),
                past,
            )
        ]
    if k == 7:
        return [(ask(r, f"Put this in the future tense: {r.choice([pres, past])}"), fut)]
    if k == 8:
        return [(ask(r, f"Make this a question: {pres}"), f"Does {n} {v} {OBJ[v]}?")]
    if k == 9:
        return [
            (
                ask(r, r.choice(["Make this negative: {}", "Negate this sentence: {}"]).format(pres)),
                f"{n} does not {v} {OBJ[v]}.",
            )
        ]
    if k == 10:
        w = r.choice(NOUNS + ITEMS)
        return [(ask(r, r.choice([f"Spell the word {w}", f"Spell {w}"])), "-".join(w))]
    if k == 11:
        w = r.choice(NOUNS + ITEMS + list(WORDS))
        return [
            (
                ask(r, r.choice([f"Write the word {w} backwards", f"Reverse the word {w}"])),
                f"{'-'.join(w)}\n{'-'.join(w[::-1])}\n{w[::-1]}",
            )
        ]
    toks = s[:-1].split()
    return [(ask(r, f"Reverse the order of the words: {s[:-1]}"), " ".join(toks[::-1]))]


def fam_edit(r):
    s = " ".join(sentence(r) for _ in range(r.choice([1, 1, 2, 3])))
    k = r.randrange(7)
    if k <= 1:
        return [
            (
                ask(
                    r,
                    r.choice(
                        [
                            "Repeat this: {}",
                            "Say this again: {}",
                            "Repeat the following text: {}",
                            "Copy this text: {}",
                            "Echo: {}",
                        ]
                    ).format(s),
                ),
                s,
            )
        ]
    words = [w.strip(".") for w in s.split()]
    w = r.choice([x for x in words if len(x) > 2])
    new = r.choice(NOUNS)
    if k <= 3:
        out = " ".join(new + ("." if t.endswith(".") else "") if t.strip(".") == w else t for t in s.split())
        return [
            (
                ask(
                    r,
                    r.choice(
                        [
                            'Replace "{a}" with "{b}" in this text: {s}',
                            "Change {a} to {b}: {s}",
                            "In the text below, replace {a} by {b}.\n{s}",
                        ]
                    ).format(a=w, b=new, s=s),
                ),
                out,
            )
        ]
    if k == 4:
        t = [x for x in s.split() if x.strip(".") != w]
        return [(ask(r, f'Remove the word "{w}" from: {s}'), " ".join(t))]
    if k == 5:
        ss = s.replace(". ", ".\n")
        return [(ask(r, f"Put each sentence on its own line: {s}"), ss)]
    it = r.sample(ITEMS, r.randint(3, 5))
    return [(f"Fix the commas in this list: {' '.join(it)}", ", ".join(it))]


# ---------------------------------------------------------------- knowledge
def fam_facts(r):
    k = r.randrange(16)
    if k <= 2:
        c = r.choice(list(CAPITALS))
        q = r.choice(
            [
                f"What is the capital of {c}?",
                f"What's the capital of {c}?",
                f"Capital of {c}?",
                f"capital of {c}",
                f"What city is the capital of {c}?",
                f"Do you know the capital of {c}?",
                f"Name the capital of {c}.",
                f"Tell me the capital of {c}.",
                f"Which city is the capital of {c}?",
            ]
        )
        turns = [(noise(r, q), f"The capital of {c} is {CAPITALS[c]}.")]
        while r.random() < 0.35:
            c = r.choice(list(CAPITALS))
            turns.append(
                (r.choice([f"And {c}?", f"And of {c}?", f"What about {c}?"]), f"The capital of {c} is {CAPITALS[c]}.")
            )
        return turns
    if k == 3:
        c = r.choice(list(CAPITALS))
        return [
            (
                r.choice(
                    [
                        f"{CAPITALS[c]} is the capital of which country?",
                        f"Which country has the capital {CAPITALS[c]}?",
                        f"In which country is {CAPITALS[c]}?",
                    ]
                ),
                f"{CAPITALS[c]} is the capital of {c}.",
            )
        ]
    if k == 4:
        p = r.choice(list(PLANETS))
        i = list(PLANETS).index(p) + 1
        return [
            (
                r.choice([f"Tell me about {p}.", f"What is {p}?", f"What do you know about the planet {p}?"]),
                f"{p} is {PLANETS[p]}. It is planet number {i} counted from the Sun.",
            )
        ]
    if k == 5:
        ps = list(PLANETS)
        return r.choice(
            [
                [
                    (
                        ask(
                            r,
                            r.choice(["Name the planets", "List the planets of the solar system", "List all planets"]),
                        ),
                        ", ".join(ps[:-1]) + " and " + ps[-1] + ".",
                    )
                ],
                [
                    (
                        r.choice(["Which planet is the largest?", "What is the biggest planet?"]),
                        "Jupiter is the largest planet.",
                    )
                ],
                [(r.choice(["Which planet is closest to the Sun?"]), "Mercury is the planet closest to the Sun.")],
                [("Which planet is called the red planet?", "Mars is called the red planet.")],
                [("Which planet has rings?", "Saturn is famous for its bright rings.")],
                [("How many planets are there?", "There are eight planets in the solar system.")],
                [("What is the largest ocean?", "The Pacific Ocean is the largest ocean.")],
                [("What is the highest mountain?", "Mount Everest is the highest mountain on Earth.")],
            ]
        )
    if k in (6, 7):
        a = r.choice(list(ANIMALS))
        kind, sound, baby, legs = ANIMALS[a]
        return r.choice(
            [
                [
                    (
                        r.choice([f"What sound does {a_an(a)} make?", f"What does {a_an(a)} say?"]),
                        f"{cap(a_an(a))} can {sound}."
                        if not sound.startswith("make")
                        else f"{cap(a_an(a))} makes almost no sound.",
                    )
                ],
                [
                    (
                        r.choice([f"How many legs does {a_an(a)} have?", f"How many legs has {a_an(a)}?"]),
                        f"{cap(a_an(a))} has {'no' if legs == 0 else DIGITS[legs]} legs.",
                    )
                ],
                [
                    (
                        r.choice([f"What is a baby {a} called?", f"What do you call a young {a}?"]),
                        f"A baby {a} is called {a_an(baby)}.",
                    )
                ],
                [(f"What kind of animal is {a_an(a)}?", f"{cap(a_an(a))} is {kind}.")],
            ]
        )
    if k == 8:
        x, y = r.choice(OPPOSITES)
        if r.random() < 0.5:
            x, y = y, x
        return [
            (
                r.choice([f"What is the opposite of {x}?", f"Opposite of {x}?", f'Give me the opposite of "{x}".']),
                f'The opposite of "{x}" is "{y}".',
            )
        ]
    if k == 9:
        e = r.choice(list(ELEMENTS))
        return r.choice(
            [
                [(f"What is the chemical symbol for {e}?", f"The symbol for {e} is {ELEMENTS[e]}.")],
                [(f"Which element has the symbol {ELEMENTS[e]}?", f"{ELEMENTS[e]} is the symbol for {e}.")],
            ]
        )
    if k == 10:
        c = r.choice(list(CURRENCY))
        return [
            (
                r.choice([f"What is the currency of {c}?", f"Which money is used in {c}?"]),
                f"The currency of {c} is the {CURRENCY[c]}.",
            )
        ]
    if k == 11:
        z = r.choice(list(CONTINENT))
        c = r.choice(CONTINENT[z])
        return [
            (
                r.choice([f"On which continent is {c}?", f"Where is {c}?", f"Which continent is {c} in?"]),
                f"{c} is in {z}.",
            )
        ]
    if k == 12:
        i = r.randrange(7)
        return r.choice(
            [
                [(f"Which day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}.")],
                [(f"Which day comes before {DAYS[i]}?", f"{DAYS[i - 1]} comes before {DAYS[i]}.")],
                [(ask(r, "List the days of the week"), ", ".join(DAYS))],
                [("How many days are in a week?", "There are seven days in a week.")],
            ]
        )
    if k == 13:
        i = r.randrange(12)
        return r.choice(
            [
                [(f"Which month comes after {MONTHS[i]}?", f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}.")],
                [
                    (
                        f"How many days does {MONTHS[i]} have?",
                        f"{MONTHS[i]} has {MONTH_DAYS[i]} days." + (" In a leap year it has 29." if i == 1 else ""),
                    )
                ],
                [(ask(r, "List the months of the year"), ", ".join(MONTHS))],
                [(f"Which month is number {i + 1}?", f"Month number {i + 1} is {MONTHS[i]}.")],
            ]
        )
    if k == 14:
        (x, y), z = r.choice(list(MIX.items()))
        t = r.choice(list(THING_COLOR))
        return r.choice(
            [
                [(f"What color do you get when you mix {x} and {y}?", f"When you mix {x} and {y} you get {z}.")],
                [(f"What color is {t}?", f"{cap(t)} is {THING_COLOR[t]}.")],
            ]
        )
    return (
        [
            (
                r.choice(["How many hours are in a day?", "How many hours does a day have?"]),
                "There are 24 hours in a day.",
            )
        ]
        if r.random() < 0.3
        else r.choice(
            [
                [("How many minutes are in an hour?", "There are 60 minutes in an hour.")],
                [("How many seconds are in a minute?", "There are 60 seconds in a minute.")],
                [("How many months are in a year?", "There are 12 months in a year.")],
                [("What are the four seasons?", "The four seasons are spring, summer, autumn and winter.")],
                [("What are the primary colors?", "The primary colors are red, yellow and blue.")],
                [("What is water made of?", "Water is made of hydrogen and oxygen.")],
                [("What is the alphabet?", ", ".join("abcdefghijklmnopqrstuvwxyz"))],
                [(ask(r, "Write the alphabet"), ", ".join("abcdefghijklmnopqrstuvwxyz"))],
                [("At what temperature does water boil?", "Water boils at 100 degrees Celsius.")],
            ]
        )
    )


UNITS = [
    ("kilometers", "meters", 1000),
    ("meters", "centimeters", 100),
    ("kilograms", "grams", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("liters", "milliliters", 1000),
    ("centimeters", "millimeters", 10),
    ("years", "months", 12),
    ("feet", "inches", 12),
    ("dozen", "pieces", 12),
    ("yards", "feet", 3),
    ("tons", "kilograms", 1000),
]


def fam_units(r):
    k = r.random()
    if k < 0.65:
        a, b, m = r.choice(UNITS)
        n = r.randint(1, 12) if m in (60, 24, 12, 7) else r.randint(1, 50)
        if r.random() < 0.7:
            q = r.choice(
                [
                    f"Convert {n} {a} to {b}.",
                    f"How many {b} are {n} {a}?",
                    f"How many {b} are in {n} {a}?",
                    f"{n} {a} in {b}?",
                ]
            )
            one = {"feet": "foot", "dozen": "dozen"}.get(a, a[:-1])
            return [(noise(r, q), f"One {one} is {m} {b}.\n{n} x {m} = {n * m}\nSo {n} {a} are {n * m} {b}.")]
        q = r.choice([f"Convert {n * m} {b} to {a}.", f"How many {a} are {n * m} {b}?"])
        one = {"feet": "foot", "dozen": "dozen"}.get(a, a[:-1])
        return [(noise(r, q), f"One {one} is {m} {b}.\n{n * m} / {m} = {n}\nSo {n * m} {b} are {n} {a}.")]
    if k < 0.85:
        c = r.randint(-4, 20) * 5
        f = c * 9 // 5 + 32
        return r.choice(
            [
                [
                    (
                        f"Convert {c} degrees Celsius to Fahrenheit.",
                        f"{c} x 9 / 5 = {c * 9 // 5}\n{c * 9 // 5} + 32 = {f}\nSo {c} C is {f} F.",
                    )
                ],
                [(f"Convert {f} F to Celsius.", f"{f} - 32 = {f - 32}\n{f - 32} x 5 / 9 = {c}\nSo {f} F is {c} C.")],
            ]
        )
    n = r.randint(1, 40)
    m = round(n * 0.62, 2)
    return [
        (
            r.choice([f"Convert {n} km to miles.", f"How many miles are {n} kilometers?"]),
            f"One kilometer is about 0.62 miles.\n{n} x 0.62 = {m:g}\nSo {n} kilometers are about {m:g} miles.",
        )
    ]


def fam_explain(r):
    if r.random() < 0.2:
        a = r.choice(list(ANIMALS))
        kind, sound, baby, legs = ANIMALS[a]
        legs_t = f"It has {DIGITS[legs]} legs." if legs else "It has no legs."
        s = (
            f"{cap(a_an(a))} is {kind}. {legs_t} "
            + (f"It can {sound}. " if not sound.startswith("make") else "")
            + f"A baby {a} is called {a_an(baby)}."
        )
        pl = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep", "deer": "deer"}.get(a, plural(a))
        return [
            (
                r.choice(
                    [
                        f"Tell me about the {a}.",
                        f"Tell me about {pl}.",
                        f"What is {a_an(a)}?",
                        f"Describe {a_an(a)}.",
                        f"What do you know about {pl}?",
                        f"Write about {pl}.",
                    ]
                ),
                s,
            )
        ]
    w = r.choice(list(WORDS))
    d, e = WORDS[w]
    noun = w not in "gentle brave honest curious patient generous ancient fragile silent".split()
    art = (
        a_an(w)
        if w not in "memory freedom courage wisdom laughter music gravity energy winter summer democracy".split()
        and noun
        else w
    )
    base = f'"{cap(w)}" means {d}.' if not noun else f"{cap(art)} is {d}."
    turns = [
        (
            r.choice(
                [f"What does {w} mean?", f'What does the word "{w}" mean?', f"Explain the word {w}.", f"Define {w}."]
                + ([f"What is {art}?"] * 2 if noun else [])
            ),
            base,
        )
    ]
    if r.random() < 0.5:
        turns.append(
            (ask(r, r.choice(["Use it in a sentence", "Give me an example sentence", "Make a sentence with it"])), e)
        )
    if r.random() < 0.2:
        return [(ask(r, f"Write a sentence with the word {w}"), e)]
    return turns


def fam_five(r):
    cat = r.choice(list(LISTS))
    n = r.choice([3, 4, 5, 5, 5, 6, 7])
    num = DIGITS[n] if r.random() < 0.5 else str(n)
    xs = r.sample(LISTS[cat], n)
    style = r.choice(["bullet", "number", "comma", "number"])
    hint = {"bullet": " as a bullet list", "comma": " separated by commas", "number": ""}[style]
    out = {
        "bullet": "\n".join(f"- {x}" for x in xs),
        "number": "\n".join(f"{i}. {x}" for i, x in enumerate(xs, 1)),
        "comma": ", ".join(xs),
    }[style]
    turns = [
        (
            ask(
                r,
                r.choice(
                    [
                        "Give me a list of {n} {c}{h}",
                        "Write down {n} {c}{h}",
                        "Show me {n} {c}{h}",
                        "Can I have {n} {c}{h}",
                        "Give me {n} {c}{h}",
                        "List {n} {c}{h}",
                        "Name {n} {c}{h}",
                        "Tell me {n} {c}{h}",
                    ]
                ).format(n=num, c=cat, h=hint),
            ),
            out,
        )
    ]
    while r.random() < 0.35 and len(turns) < 4:
        m = r.randrange(4)
        if m == 0:
            xs = sorted(xs)
            turns.append((ask(r, "Sort them"), ", ".join(xs)))
        elif m == 1:
            turns.append((ask(r, r.choice(["Write them as JSON", "Make it a JSON list"])), json.dumps(xs)))
        elif m == 2:
            x = r.choice([y for y in LISTS[cat] if y not in xs] or [xs[0]])
            turns.append((r.choice(["One more please.", "Give me one more.", "Another one?"]), x))
        else:
            turns.append(
                (
                    r.choice(["Which one is the longest word?", "Which word is the longest?"]),
                    f"The longest word is {max(xs, key=len)}.",
                )
            )
    return turns


def fam_howto(r):
    t = r.choice(list(HOWTO))
    st = HOWTO[t]
    turns = [
        (
            r.choice(
                [
                    f"How do I {t}?",
                    f"How can I {t}?",
                    f"Tell me how to {t}.",
                    f"Explain how to {t} in steps.",
                    f"How to {t}?",
                    f"how do you {t}",
                    f"What is the best way to {t}?",
                    f"Give me steps to {t}.",
                ]
            ),
            "\n".join(f"{i}. {s}" for i, s in enumerate(st, 1)),
        )
    ]
    if r.random() < 0.25:
        i = r.randint(1, len(st))
        turns.append((r.choice([f"What is step {i}?", f"Repeat step {i}."]), st[i - 1]))
    return turns


def fam_letter(r):
    a, b = r.sample(NAMES, 2)
    day = r.choice(DAYS)
    topics = {
        "the meeting": [
            f"I would like to meet you on {day} to talk about our plan.",
            "Please tell me if this time is good for you.",
        ],
        "a birthday party": [f"I want to invite you to my birthday party on {day}.", "There will be cake and music."],
        "a thank you": ["Thank you very much for your help last week.", "I could not have done it without you."],
        "being late": [f"I am sorry, but I will be late on {day}.", "Please start without me."],
        "a book": ["I have just read the book you gave me.", "I liked it very much and will bring it back soon."],
        "a trip": [f"We are planning a trip to {r.choice(CITIES)} on {day}.", "Would you like to come with us?"],
        "a sick day": [f"I am sick and cannot come to work on {day}.", "I hope to be back soon."],
    }
    t = r.choice(list(topics))
    kind = r.choice(["email", "letter", "message"])
    signed = r.random() < 0.6
    q = f"Write a short {kind} to {b} about {t}" + (f" from {a}" if signed else "")
    body = f"Dear {b},\n\n" + " ".join(topics[t]) + f"\n\nBest wishes,\n{a if signed else 'your friend'}"
    if day not in body or day in q:
        return [(ask(r, q), body)]
    return [(ask(r, q + f" on {day}"), body)]


def fam_convo_memory(r):
    """Facts given early and asked later."""
    n, c, col, pet = r.choice(NAMES), r.choice(CITIES), r.choice(LISTS["colors"][:8]), r.choice(list(ANIMALS))
    facts = [
        (f"My name is {n}.", f"Nice to meet you, {n}!", "What is my name?", f"Your name is {n}."),
        (f"I live in {c}.", f"{c} sounds like a nice place.", "Where do I live?", f"You live in {c}."),
        (
            f"My favorite color is {col}.",
            f"{cap(col)} is a nice color.",
            "What is my favorite color?",
            f"Your favorite color is {col}.",
        ),
        (
            f"I have {a_an(pet)}.",
            f"{cap(a_an(pet))} is a good companion.",
            "Which animal do I have?",
            f"You have {a_an(pet)}.",
        ),
    ]
    pick = r.sample(facts, r.choice([1, 2, 2, 3]))
    turns = [(f[0], f[1]) for f in pick]
    if r.random() < 0.5:
        turns += r.choice([fam_facts, fam_math, fam_five])(r)
    r.shuffle(pick)
    return turns + [(f[2], f[3]) for f in pick]


def fam_classify(r):
    cat, other = r.sample(
        [
            "fruits",
            "vegetables",
            "animals",
            "colors",
            "tools",
            "drinks",
            "clothes",
            "vehicles",
            "instruments",
            "sports",
            "trees",
            "flowers",
        ],
        2,
    )
    xs = r.sample(LISTS[cat], 3)
    odd = r.choice([x for x in LISTS[other] if x not in LISTS[cat]])
    k = r.randrange(3)
    if k == 0:
        ys = [*xs, odd]
        r.shuffle(ys)
        return [
            (
                r.choice(["Which one does not belong: {}?", "Find the odd one out: {}"]).format(", ".join(ys)),
                f"{cap(odd)} does not belong. The others are {cat}.",
            )
        ]
    if k == 1:
        return [(f"What are {join_and(xs)}?", f"They are {cat}.")]
    mood = r.choice(
        [
            ("I love this {}, it is great!", "positive"),
            ("This {} is wonderful.", "positive"),
            ("What a terrible {}.", "negative"),
            ("I hate this {}, it broke at once.", "negative"),
            ("The best {} I ever had!", "positive"),
            ("The {} was a waste of money.", "negative"),
        ]
    )
    return [
        (
            r.choice(
                [
                    "Is this review positive or negative? {}",
                    "Classify as positive or negative: {}",
                    "What is the sentiment of this text? {}",
                ]
            ).format(mood[0].format(r.choice(ITEMS))),
            f"The text is {mood[1]}.",
        )
    ]


FAMILIES = {
    "chat": (fam_chat, 7),
    "unknown": (fam_unknown, 5),
    "count": (fam_count, 6),
    "math": (fam_math, 12),
    "lists": (fam_lists, 10),
    "json": (fam_json, 11),
    "table": (fam_table, 9),
    "code": (fam_code, 16),
    "print": (fam_print, 3),
    "story": (fam_story, 8),
    "poem": (fam_poem, 4),
    "rewrite": (fam_rewrite, 8),
    "edit": (fam_edit, 6),
    "facts": (fam_facts, 9),
    "units": (fam_units, 5),
    "explain": (fam_explain, 4),
    "five": (fam_five, 6),
    "howto": (fam_howto, 3),
    "letter": (fam_letter, 3),
    "memory": (fam_convo_memory, 3),
    "classify": (fam_classify, 3),
}
_NAMES, _WEIGHTS = list(FAMILIES), [w for _, w in FAMILIES.values()]


def conversation(r, family=None):
    """One chat as a list of (role, text)."""
    msgs = [("system", r.choice(SYSTEMS))] if r.random() < 0.2 else []
    n = 1 if family else r.choice([1, 1, 1, 2, 2, 3, 5])
    for _ in range(n):
        fam = family or r.choices(_NAMES, _WEIGHTS)[0]
        for q, a in FAMILIES[fam][0](r):
            msgs += [("user", q), ("assistant", a)]
    return msgs


def pieces(msgs):
    """ChatML text pieces with a flag: does the piece carry loss?"""
    for role, text in msgs:
        yield f"<|im_start|>{role}\n", False
        yield text + "<|im_end|>", role == "assistant"
        yield "\n", False


def encode_chats(tok, chats, out):
    texts, flags = [], []
    for c in chats:
        for t, f in c:
            texts.append(t)
            flags.append(f)
        texts.append("<|endoftext|>")
        flags.append(False)
    for e, f in zip(tok.encode_batch(texts, add_special_tokens=False), flags, strict=True):
        ids = np.asarray(e.ids, dtype=np.uint16)
        out.append(ids | LOSS_BIT if f else ids)


def make_shard(job):
    """Write one shard of at least n tokens."""
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    path, seed, n_tokens, tok_path, raw_path = job
    r, tok = random.Random(seed), Tokenizer.from_file(tok_path)
    raw = Path(raw_path).read_text() if raw_path else ""
    out, total = [], 0
    while total < n_tokens:
        k0 = len(out)
        chats = [list(pieces(conversation(r))) for _ in range(500)]
        if raw:
            for _ in range(3):
                i = r.randrange(len(raw) - 2000)
                chats.append([(raw[i : i + r.randint(300, 1500)], True)])
            r.shuffle(chats)
        encode_chats(tok, chats, out)
        total += sum(len(x) for x in out[k0:])
    np.concatenate(out)[:n_tokens].tofile(path)
    return path


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", required=True)
    p.add_argument("--tokenizer", help="tokenizer.json; without it a text sample for train_tokenizer.py is written")
    p.add_argument("--raw", help="public-domain text file mixed in as raw text")
    p.add_argument("--shards", type=int, default=64)
    p.add_argument("--tokens-per-shard", type=int, default=5_000_000)
    p.add_argument("--workers", type=int, default=16)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    if not a.tokenizer:
        r = random.Random(a.seed)
        raw = Path(a.raw).read_text()[:200_000] if a.raw else ""
        with open(a.out, "w") as f:
            for _ in range(30_000):
                for _, t in conversation(r):
                    f.write(t + "\n")
            f.write(raw)
        return
    Path(a.out).mkdir(parents=True, exist_ok=True)
    jobs = [
        (f"{a.out}/{i:04d}.bin", a.seed * 100_003 + i, a.tokens_per_shard, a.tokenizer, a.raw) for i in range(a.shards)
    ]
    with Pool(a.workers) as pool:
        for path in pool.imap_unordered(make_shard, jobs):
            print("shard", path, flush=True)


if __name__ == "__main__":
    main()
