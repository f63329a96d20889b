"""Procedural chat data for the demo model.

Every conversation is drawn from a seeded random generator, so the corpus can be rebuilt at any size and no text is downloaded
(a small public-domain file can be mixed in as raw text).  `python data.py --help` writes the tokenizer sample or token shards.
Shards are uint16: the token id, with bit 15 set where the token carries loss (assistant replies and raw text).
"""

import argparse
import json
import random
import tomllib
from multiprocessing import Pool
from pathlib import Path
from types import SimpleNamespace

import numpy as np

TABLES, CODE, facts = (
    tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())
    for name in ("chats", "code_patterns", "facts")
)
FACTS = SimpleNamespace(**facts)
LOSS_BIT = 0x8000
DIGITS = "zero one two three four five six seven eight nine ten eleven twelve".split()
SYSTEMS = TABLES["all"]["systems"]


GIRLS = set(
    """Anna Clara Emma Grace Iris Kate Mia Olivia Rosa Tara Uma Wendy Yara Zoe Alice Carol Eve Gina Ines Kira Maya Nina Petra Sara
Vera Lena Ada Grete Julia Lucy Nora Pia Rita Ursula Hana Mei Leila Elena Quinn""".split()
)
SYL = "ba be bi bo bu da de di do du fa fe fi ga go ka ke ki ko la le li lo lu ma me mi mo mu na ne ni no pa pe po ra re ri ro sa se si so ta te ti to va ve vi vo za zo".split()


def say(key, /, **words):
    """The lines of chats.toml under `family.key`, with these words in them."""
    family, _, name = key.partition(".")
    return [line.format(**words) for line in TABLES[family][name]]


def cap(s):
    return s[:1].upper() + s[1:]


def a_an(w):
    return ("an " if w[0].lower() in "aeiou" else "a ") + w


def made_up(r):
    return "".join(r.choice(SYL) for _ in range(r.randint(2, 4))) + r.choice(
        ["", "n", "r", "l", "s", "x"]
    )


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
        return r.choice(say("ask.t1")) + imperative[0].lower() + imperative[1:]
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
IDENTITY = TABLES["all"]["identity"]


def fam_chat(r):
    turns = []
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        q, a = r.choice(IDENTITY)
        turns.append((noise(r, r.choice(q)), r.choice(a)))
    return turns


UNKNOWN_Q = TABLES["all"]["unknown_q"]


def fam_unknown(r):
    q = r.choice(UNKNOWN_Q).format(
        y=r.randint(1900, 2030),
        c=r.choice(FACTS.CITIES),
        d=r.choice(FACTS.CITIES),
        n=r.choice(FACTS.NAMES),
        k=r.choice(list(FACTS.CAPITALS)),
        w=r.choice(FACTS.NOUNS + FACTS.ITEMS),
        w2=r.choice(say("unknown.t1")),
        a="a",
        m=cap(made_up(r)) if r.random() < 0.5 else made_up(r),
        p=r.choice(list(FACTS.PLANETS)),
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
            (
                ask(r, f"Count by {w} from {a} to {a + step * n}"),
                ", ".join(str(a + i * step) for i in range(n + 1)),
            )
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
        w = r.choice(
            FACTS.NOUNS
            + FACTS.ITEMS
            + list(FACTS.WORDS)
            + FACTS.LISTS["fruits"]
            + FACTS.LISTS["flowers"]
        )
        ch = r.choice(w if r.random() < 0.85 else "aeiorst")
        n = w.count(ch)
        q = r.choice(say("count.t1", ch=ch, w=w))
        return [
            (q, f'{"-".join(w)}\nThe letter {ch} appears {n} {"time" if n == 1 else "times"} in "{w}".')
        ]
    if k == 3:
        w = r.choice(FACTS.NOUNS + FACTS.ITEMS + list(FACTS.WORDS))
        q = r.choice(say("count.t2", w=w))
        return [(q, f'The word "{w}" has {len(w)} letters: {", ".join(w)}.')]
    if k == 4:
        s = sentence(r)
        n = len(s.split())
        return [
            (
                r.choice([f"How many words are in this sentence? {s}", f"Count the words: {s}"]),
                "\n".join(f"{i}. {w}" for i, w in enumerate(s[:-1].split(), 1))
                + f"\nThe sentence has {n} words.",
            )
        ]
    if k == 5 and r.random() < 0.5:
        n = r.randint(3, 12)
        return [
            (
                ask(r, r.choice(say("count.t3", x1=DIGITS[n], n=n, x2=DIGITS[n]))),
                ", ".join(map(str, range(1, n + 1))),
            )
        ]
    if k == 5:
        n = r.randint(2, 12)
        return [
            (ask(r, f"Write the numbers from one to {DIGITS[n]} in words"), ", ".join(DIGITS[1 : n + 1]))
        ]
    if k == 6:
        n = r.randint(3, 10)
        it = r.choice(FACTS.ITEMS)
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
            r.choice(say("count.t4")).format(", ".join(map(str, seq[:-1]))),
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
        q = r.choice(say("math.t1", a=a, b=b))
        return [(noise(r, q), steps_add(a, b))]
    if k == 2:
        a, b = max(a, b), min(a, b)
        q = r.choice(say("math.t2", a=a, b=b))
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
        q = r.choice(say("math.t3", a=a, b=b))
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
        q = r.choice(say("math.t4", a=a, b=b))
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
        q = r.choice(
            [f"Which is larger, {a} or {b}?", f"Is {a} greater than {b}?", f"Compare {a} and {b}."]
        )
        if q.startswith("Is"):
            return [
                (q, f"Yes, {a} is greater than {b}." if a > b else f"No, {a} is not greater than {b}.")
            ]
        return [(q, f"{a} and {b} are equal." if a == b else f"{max(a, b)} is larger than {min(a, b)}.")]
    if k == 7:
        xs = num_list(r, 3, 5, r.choice([10, 20, 50]))
        s, out = xs[0], []
        for x in xs[1:]:
            out.append(f"{s} + {x} = {s + x}")
            s += x
        q = r.choice(
            ["What is the sum of {}?", "Add these numbers: {}", "Sum: {}", "Add up {}."]
        ).format(", ".join(map(str, xs)))
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
                r.choice(["What is the average of {}?", "Find the mean of {}."]).format(
                    ", ".join(map(str, xs))
                ),
                f"The sum is {s}.\nThere are {n} numbers.\n{s} / {n} = {s // n}\nThe average is {s // n}.",
            )
        ]
    if k == 9:
        q = r.choice([f"Is {a} even or odd?", f"Is {a} an even number?"])
        return [(q, f"{a} is {'even' if a % 2 == 0 else 'odd'} because it ends in {a % 10}.")]
    n, it = r.choice(FACTS.NAMES), r.choice(FACTS.ITEMS)
    its = (
        it + ("es" if it.endswith(("x", "sh", "ch")) else "s")
        if it not in ("knife", "bread", "soap")
        else "books"
    )
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
    words = r.sample(
        r.choice([FACTS.NOUNS, FACTS.ITEMS, FACTS.LISTS["fruits"], FACTS.LISTS["animals"], FACTS.NAMES]),
        r.randint(3, 8),
    )
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
                r.choice([f"Sort {ref}", f"Sort {ref}"] if i else say("lists.t1", ref=ref, head=head))
                if not use_words
                else r.choice(
                    [
                        f"Sort {ref}",
                        f"Put {ref} in alphabetical order"
                        if i
                        else f"Put in alphabetical order: {head}",
                    ]
                )
            )
            xs = sorted(xs)
        elif op == 1:
            q = f"Reverse {ref}" if i else r.choice(say("lists.t2", head=head, ref=ref))
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
            q = r.choice(say("lists.t3", ref=ref))
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
                    (
                        q,
                        f"The {'longest' if f is max else 'shortest'} word is {best} with {len(best)} letters.",
                    )
                )
            else:
                q = (
                    f"What is the {'largest' if f is max else 'smallest'} of {ref if i == 0 else 'these numbers'}"
                    + "?"
                )
                turns.append((q, f"The {'largest' if f is max else 'smallest'} number is {f(xs)}."))
            continue
        elif op == 5:
            n = r.randint(1, min(3, len(xs)))
            end = r.choice(["first", "last"])
            q = f"Give me the {end} {n} {'items' if n > 1 else 'item'}" + (
                f" of {head}" if i == 0 else ""
            )
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
                (
                    ask(r, q),
                    "\n".join(
                        (f"- {x}" if style == "bullet" else f"{j}. {x}") for j, x in enumerate(xs, 1)
                    ),
                )
            )
            continue
        elif op == 9:
            new = r.choice(FACTS.NOUNS) if use_words else r.randint(1, 99)
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
    "name": lambda r: r.choice(FACTS.NAMES),
    "age": lambda r: r.randint(5, 90),
    "city": lambda r: r.choice(FACTS.CITIES),
    "color": lambda r: r.choice(FACTS.LISTS["colors"]),
    "price": lambda r: r.randint(1, 200),
    "item": lambda r: r.choice(FACTS.ITEMS),
    "pet": lambda r: r.choice(list(FACTS.ANIMALS)),
    "id": lambda r: r.randint(1, 999),
    "job": lambda r: r.choice(FACTS.LISTS["jobs"]),
    "score": lambda r: r.randint(0, 100),
    "active": lambda r: r.random() < 0.5,
    "day": lambda r: r.choice(FACTS.DAYS),
    "quantity": lambda r: r.randint(1, 40),
    "year": lambda r: r.randint(1950, 2030),
    "hobby": lambda r: r.choice(FACTS.LISTS["sports"]),
    "country": lambda r: r.choice(FACTS.LISTS["countries"]),
    "email": lambda r: r.choice(FACTS.NAMES).lower() + "@example.com",
}


def schema(r, lo=2, hi=5):
    return r.choice([["name"], ["name"], ["item"], ["id", "name"], ["city"]]) + r.sample(
        say("schema.t1"), r.randint(lo, hi) - 1
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
        turns = [(ask(r, r.choice(say("json.t1")).format(t=tail, f=flat)), wrap(js))]
        for _ in range(r.choice([0, 0, 1, 2])):
            m = r.randrange(4)
            if m == 0:
                kk = r.choice(keys)
                turns.append(
                    (
                        r.choice([f"What is the {kk}?", f"Which {kk} is in it?"]),
                        f"The {kk} is {val(rec[kk])}.",
                    )
                )
            elif m == 1:
                kk = r.choice([f for f in FIELDS if f not in rec])
                rec[kk] = FIELDS[kk](r)
                turns.append(
                    (
                        ask(r, f"Add the field {kk} with the value {val(rec[kk])}"),
                        wrap(dump(r, rec, ind)),
                    )
                )
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
        return [(r.choice(say("json.t2", kk=kk, js=js)), r.choice([f"The {kk} is {val(rec[kk])}."]))]
    if k == 4 and r.random() < 0.6:
        if r.random() < 0.5:
            n, age, city = r.choice(FACTS.NAMES), r.randint(5, 90), r.choice(FACTS.CITIES)
            q = r.choice(say("json.t3", n=n, age=age, city=city))
            return [(ask(r, q), wrap_json({"name": n, "age": age, "city": city}))]
        ks = r.sample(["name", "age", "city", "color", "price", "job", "score"], r.randint(2, 4))
        q = r.choice(say("json.t4", x1=join_and(ks), x2=join_and(ks), x3=join_and(ks)))
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
        n = r.choice(FACTS.NAMES)
        age, city, job = r.randint(18, 80), r.choice(FACTS.CITIES), r.choice(FACTS.LISTS["jobs"])
        s = f"{n} is {age} years old, lives in {city} and works as {a_an(job)}."
        s2 = f"{n}, {a_an(job)} from {city}, is {age}."
        return [
            (
                ask(r, r.choice(say("json.t5")) + r.choice([s, s2])),
                dump(r, {"name": n, "age": age, "city": city, "job": job}, 2),
            )
        ]
    n = r.choice(FACTS.NAMES)
    rec = {"name": n, "age": r.randint(18, 80), "city": r.choice(FACTS.CITIES)}
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
            ask(r, r.choice(say("table.t1")).format(s=src.replace("a ", ""), d=dst, t=forms[src])),
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
                        body(keys, recs)
                        if body
                        else "[\n" + ",\n".join("  " + json.dumps(x) for x in recs) + "\n]",
                    )
                )
    if r.random() < 0.25:
        n = r.choice([3, 4, 5])
        cat = r.choice(["fruits", "animals", "colors", "jobs", "tools", "drinks"])
        xs = r.sample(FACTS.LISTS[cat], n)
        rows = [{"item": x, "price": r.randint(1, 30)} for x in xs]
        src = ", ".join(f"{x['item']} {x['price']}" for x in rows)
        turns = [
            (ask(r, f"Make a table of these items and prices: {src}"), md_of(["item", "price"], rows))
        ]
    return turns


# ---------------------------------------------------------------- code
def fam_code(r):
    if r.random() < 0.08:
        what, cname, src = r.choice(CODE["class"]).values()
        src = src.replace("$c", cname)
        return [(ask(r, r.choice(say("code.t1", what=what, cname=cname))), f"```python\n{src}\n```")]
    what, names, src, ex, res = r.choice(CODE["pattern"]).values()
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
            f"Write Python code that {what}"
            if not given
            else f"Write a Python function{extra} that {what}",
            f"Implement a function{extra} that {what}",
            f"Give me a Python function{extra} that {what}",
            f"Code a function{extra} that {what}",
        ]
    )
    verb, rest = what.split(" ", 1)
    base = TABLES["code"]["t2"].get(verb, verb[:-2] if verb.endswith("ches") else verb[:-1])
    todo = f"{r.choice(['compute', 'calculate', 'get', 'find', 'return']) if base == 'return' else base} {rest}"
    key = names[0].replace("_", " ")
    style_q = r.random()
    if not given and style_q < 0.45:
        q = r.choice(say("code.t3", todo=todo, key=key, what=what))
        if r.random() < 0.15:
            q = r.choice(say("code.t4", todo=todo))
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
                    ask(
                        r, r.choice(["Show me how to use it", "Give me an example", "How do I call it?"])
                    ),
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
            turns.append((r.choice(say("code.t5")), explain))
        elif m == 4 and '"""' not in turns[-1][1]:
            i = src.index("def ")
            j = src.index(":\n", i) + 2
            turns.append(
                (
                    ask(r, "Add a docstring"),
                    f'```python\n{src[:j]}    """{cap(what)}."""\n{src[j:]}\n```',
                )
            )
        else:
            turns.append((r.choice(["Thanks", "Thank you!"]), "You are welcome!"))
            break
    if r.random() < 0.12:
        return [(r.choice(say("code.t6", src=src)), explain)]
    return turns


def fam_print(r):
    """Small scripts and their output."""
    n, k = r.randint(2, 12), r.randrange(5)
    w = r.choice(FACTS.NOUNS)
    progs = [
        (f"for i in range({n}):\n    print(i)", "\n".join(map(str, range(n)))),
        (f'print("{w}" * {n % 4 + 1})', w * (n % 4 + 1)),
        (f"x = {n}\ny = {k + 2}\nprint(x + y)", str(n + k + 2)),
        (f"for x in [1, 2, 3]:\n    print(x * {n})", "\n".join(str(x * n) for x in (1, 2, 3))),
        (f'print(len("{w}"))', str(len(w))),
    ]
    src, out = progs[k]
    if r.random() < 0.5:
        return [
            (f"What does this program print?\n```python\n{src}\n```", f"It prints:\n```\n{out}\n```")
        ]
    return [
        (
            ask(r, f"Write a Python loop that prints the numbers from 1 to {n}"),
            f"```python\nfor i in range(1, {n + 1}):\n    print(i)\n```",
        )
    ]


# ---------------------------------------------------------------- prose
PLACES = TABLES["all"]["places"]
HEROES = TABLES["all"]["heroes"]
GOALS = TABLES["all"]["goals"]
OBST = TABLES["all"]["obst"]
MORALS = TABLES["all"]["morals"]


def draw_hero(r):
    if r.random() < 0.4:
        return r.choice(HEROES)
    noun = r.choice(list(FACTS.ANIMALS) + FACTS.LISTS["jobs"] + say("draw_hero.t1"))
    return (a_an(r.choice(FACTS.ADJ) + " " + noun) if r.random() < 0.5 else a_an(noun)), noun


def story(r, hero=None, long=None, name=None, place=None):
    h, short = hero or draw_hero(r)
    n, place = name or r.choice(FACTS.NAMES), place or r.choice(PLACES)
    goal, thing = r.choice(GOALS)
    if not name and short in ("girl", "queen", "princess", "witch"):
        n = r.choice(sorted(GIRLS))
    if not name and short in ("boy", "king", "knight", "wizard", "prince"):
        n = r.choice([x for x in FACTS.NAMES if x not in GIRLS])
    g = "she" if n in GIRLS else "he"
    his = "her" if g == "she" else "his"
    s = say("story.t1", h=h, n=n, place=place, goal=goal)
    s.append(r.choice(say("story.t2", n=n, g=g, his=his)))
    hows = r.sample(OBST, 2 if (long if long is not None else r.random() < 0.5) else 1)
    for i, (o, fix) in enumerate(hows):
        s.append(
            (f"Soon {n} came to {o}." if i == 0 else f"Later the way was blocked by {o}.")
            + " "
            + r.choice(say("story.t3", g=g, fix=fix, x1=cap(g)))
        )
    helper = r.choice(say("story.t4"))
    if r.random() < 0.6:
        s.append(
            f'On the way {g} met {helper}. "Where are you going?" asked the stranger. "I want to {goal}," said {n}. "Then follow the path to the east," was the answer.'
        )
    s.append(r.choice(say("story.t5", n=n, g=g, x1=a_an(thing), x2=a_an(thing), his=his)))
    s.append(r.choice(say("story.t6", x1=cap(g), n=n, short=short)))
    moral = r.choice(MORALS)
    title = f"The {cap(short)} and the {thing.title()}"
    return " ".join(s), title, moral, n, short


def fam_story(r):
    hero = draw_hero(r)
    kind = r.random()
    name = r.choice(FACTS.NAMES) if kind < 0.12 else None
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
        r.choice(say("story.t7")).format(h=hero[0] if r.random() < 0.6 else a_an(short))
        if kind < 0.75
        else r.choice(say("story.t8"))
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
    topics = say("poem.t1")
    t = (
        r.choice(topics)
        if r.random() < 0.5
        else r.choice(["the ", "a "])
        + r.choice([x for x in FACTS.NOUNS + list(FACTS.ANIMALS) if x[0] not in "aeiou"])
        if r.random() < 0.8
        else r.choice(say("poem.t2"))
    )
    if r.random() < 0.25:
        first = [f"{cap(t)} at first light", f"{cap(t)}, soft and still", f"Here comes {t}"]
        mid = say("poem.t3")
        last = say("poem.t4")
        return [
            (
                ask(
                    r,
                    r.choice(
                        [f"Write a haiku about {t}", f"Haiku about {t}", f"Make a haiku about {t}"]
                    ),
                ),
                "\n".join([r.choice(first), r.choice(mid), r.choice(last)]),
            )
        ]
    lines = TABLES["poem"]["t5"]
    n = r.choice([2, 2, 3, 4])
    pick = r.sample(lines, n)
    body = "\n".join(x.format(t=t) + ("," if i == 0 else ".") for p in pick for i, x in enumerate(p))
    q = ask(r, r.choice(say("poem.t6")).format(t=t))
    if r.random() < 0.2:
        a, *rest = r.choice(FACTS.RHYMES)
        return [
            (
                r.choice([f"What rhymes with {a}?", f"Give me words that rhyme with {a}."]),
                f"Words that rhyme with {a}: {', '.join(rest)}.",
            )
        ]
    return [(q, body)]


def sentence(r):
    n = r.choice(FACTS.NAMES)
    s = r.choice(
        [
            f"The {r.choice(FACTS.ADJ)} {r.choice(FACTS.NOUNS)} is near the {r.choice(FACTS.NOUNS)}.",
            f"{n} likes the {r.choice(FACTS.ADJ)} {r.choice(FACTS.ITEMS)}.",
            f"The {r.choice(FACTS.ADJ)} {r.choice(FACTS.NOUNS)} and the {r.choice(FACTS.ADJ)} {r.choice(FACTS.NOUNS)} are friends.",
            f"My {r.choice(['friend', 'sister', 'brother', 'teacher'])} has {a_an(r.choice(FACTS.ADJ))} {r.choice(FACTS.NOUNS)}.",
            f"We saw {a_an(r.choice(FACTS.ADJ))} {r.choice(FACTS.NOUNS)} in {r.choice(FACTS.CITIES)}.",
            f"There is {a_an(r.choice(FACTS.ITEMS))} on the {r.choice(['table', 'shelf', 'floor', 'bed'])}.",
            f"{n} lives in {r.choice(FACTS.CITIES)} with {a_an(r.choice(FACTS.ADJ))} {r.choice(list(FACTS.ANIMALS))}.",
        ]
    )
    return s


OBJ = TABLES["all"]["obj"]


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
        return [(ask(r, r.choice(say("rewrite.t1")).format(s)), s.upper())]
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
        w = r.choice(list(FACTS.PLURAL))
        if r.random() < 0.7:
            return [(r.choice(say("rewrite.t2", w=w)), f'The plural of "{w}" is "{FACTS.PLURAL[w]}".')]
        return [
            (
                f"What is the singular of {FACTS.PLURAL[w]}?",
                f'The singular of "{FACTS.PLURAL[w]}" is "{w}".',
            )
        ]
    if k == 5:
        v = r.choice(list(FACTS.PAST))
        return [(r.choice(say("rewrite.t3", v=v)), f'The past tense of "{v}" is "{FACTS.PAST[v]}".')]
    v = r.choice([x for x in OBJ if x in FACTS.PAST])
    n = r.choice(FACTS.NAMES)
    pres, past, fut = (
        f"{n} {third(v)} {OBJ[v]}.",
        f"{n} {FACTS.PAST[v]} {OBJ[v]}.",
        f"{n} will {v} {OBJ[v]}.",
    )
    if k == 6:
        return [(ask(r, r.choice(say("rewrite.t4")).format(pres)), past)]
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
        w = r.choice(FACTS.NOUNS + FACTS.ITEMS)
        return [(ask(r, r.choice([f"Spell the word {w}", f"Spell {w}"])), "-".join(w))]
    if k == 11:
        w = r.choice(FACTS.NOUNS + FACTS.ITEMS + list(FACTS.WORDS))
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
        return [(ask(r, r.choice(say("edit.t1")).format(s)), s)]
    words = [w.strip(".") for w in s.split()]
    w = r.choice([x for x in words if len(x) > 2])
    new = r.choice(FACTS.NOUNS)
    if k <= 3:
        out = " ".join(
            new + ("." if t.endswith(".") else "") if t.strip(".") == w else t for t in s.split()
        )
        return [(ask(r, r.choice(say("edit.t2")).format(a=w, b=new, s=s)), out)]
    if k == 4:
        t = [x for x in s.split() if x.strip(".") != w]
        return [(ask(r, f'Remove the word "{w}" from: {s}'), " ".join(t))]
    if k == 5:
        ss = s.replace(". ", ".\n")
        return [(ask(r, f"Put each sentence on its own line: {s}"), ss)]
    it = r.sample(FACTS.ITEMS, r.randint(3, 5))
    return [(f"Fix the commas in this list: {' '.join(it)}", ", ".join(it))]


# ---------------------------------------------------------------- knowledge
def fam_facts(r):
    k = r.randrange(16)
    if k <= 2:
        c = r.choice(list(FACTS.CAPITALS))
        q = r.choice(say("facts.t1", c=c))
        turns = [(noise(r, q), f"The capital of {c} is {FACTS.CAPITALS[c]}.")]
        while r.random() < 0.35:
            c = r.choice(list(FACTS.CAPITALS))
            turns.append(
                (
                    r.choice([f"And {c}?", f"And of {c}?", f"What about {c}?"]),
                    f"The capital of {c} is {FACTS.CAPITALS[c]}.",
                )
            )
        return turns
    if k == 3:
        c = r.choice(list(FACTS.CAPITALS))
        return [
            (
                r.choice(
                    say("facts.t2", x1=FACTS.CAPITALS[c], x2=FACTS.CAPITALS[c], x3=FACTS.CAPITALS[c])
                ),
                f"{FACTS.CAPITALS[c]} is the capital of {c}.",
            )
        ]
    if k == 4:
        p = r.choice(list(FACTS.PLANETS))
        i = list(FACTS.PLANETS).index(p) + 1
        return [
            (
                r.choice(say("facts.t3", p=p)),
                f"{p} is {FACTS.PLANETS[p]}. It is planet number {i} counted from the Sun.",
            )
        ]
    if k == 5:
        ps = list(FACTS.PLANETS)
        return r.choice(
            [
                [(ask(r, r.choice(say("facts.t4"))), ", ".join(ps[:-1]) + " and " + ps[-1] + ".")],
                [
                    (
                        r.choice(["Which planet is the largest?", "What is the biggest planet?"]),
                        "Jupiter is the largest planet.",
                    )
                ],
                [
                    (
                        r.choice(["Which planet is closest to the Sun?"]),
                        "Mercury is the planet closest to the Sun.",
                    )
                ],
                [("Which planet is called the red planet?", "Mars is called the red planet.")],
                [("Which planet has rings?", "Saturn is famous for its bright rings.")],
                [("How many planets are there?", "There are eight planets in the solar system.")],
                [("What is the largest ocean?", "The Pacific Ocean is the largest ocean.")],
                TABLES["facts"]["t5"],
            ]
        )
    if k in (6, 7):
        a = r.choice(list(FACTS.ANIMALS))
        kind, sound, baby, legs = FACTS.ANIMALS[a]
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
                        r.choice(
                            [f"How many legs does {a_an(a)} have?", f"How many legs has {a_an(a)}?"]
                        ),
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
        x, y = r.choice(FACTS.OPPOSITES)
        if r.random() < 0.5:
            x, y = y, x
        return [(r.choice(say("facts.t6", x=x)), f'The opposite of "{x}" is "{y}".')]
    if k == 9:
        e = r.choice(list(FACTS.ELEMENTS))
        return r.choice(
            [
                [
                    (
                        f"What is the chemical symbol for {e}?",
                        f"The symbol for {e} is {FACTS.ELEMENTS[e]}.",
                    )
                ],
                [
                    (
                        f"Which element has the symbol {FACTS.ELEMENTS[e]}?",
                        f"{FACTS.ELEMENTS[e]} is the symbol for {e}.",
                    )
                ],
            ]
        )
    if k == 10:
        c = r.choice(list(FACTS.CURRENCY))
        return [
            (
                r.choice([f"What is the currency of {c}?", f"Which money is used in {c}?"]),
                f"The currency of {c} is the {FACTS.CURRENCY[c]}.",
            )
        ]
    if k == 11:
        z = r.choice(list(FACTS.CONTINENT))
        c = r.choice(FACTS.CONTINENT[z])
        return [
            (
                r.choice(
                    [f"On which continent is {c}?", f"Where is {c}?", f"Which continent is {c} in?"]
                ),
                f"{c} is in {z}.",
            )
        ]
    if k == 12:
        i = r.randrange(7)
        return r.choice(
            [
                [
                    (
                        f"Which day comes after {FACTS.DAYS[i]}?",
                        f"{FACTS.DAYS[(i + 1) % 7]} comes after {FACTS.DAYS[i]}.",
                    )
                ],
                [
                    (
                        f"Which day comes before {FACTS.DAYS[i]}?",
                        f"{FACTS.DAYS[i - 1]} comes before {FACTS.DAYS[i]}.",
                    )
                ],
                [(ask(r, "List the days of the week"), ", ".join(FACTS.DAYS))],
                [("How many days are in a week?", "There are seven days in a week.")],
            ]
        )
    if k == 13:
        i = r.randrange(12)
        return r.choice(
            [
                [
                    (
                        f"Which month comes after {FACTS.MONTHS[i]}?",
                        f"{FACTS.MONTHS[(i + 1) % 12]} comes after {FACTS.MONTHS[i]}.",
                    )
                ],
                [
                    (
                        f"How many days does {FACTS.MONTHS[i]} have?",
                        f"{FACTS.MONTHS[i]} has {FACTS.MONTH_DAYS[i]} days."
                        + (" In a leap year it has 29." if i == 1 else ""),
                    )
                ],
                [(ask(r, "List the months of the year"), ", ".join(FACTS.MONTHS))],
                [(f"Which month is number {i + 1}?", f"Month number {i + 1} is {FACTS.MONTHS[i]}.")],
            ]
        )
    if k == 14:
        x, y, z = r.choice(FACTS.MIX)
        t = r.choice(list(FACTS.THING_COLOR))
        return r.choice(
            [
                [
                    (
                        f"What color do you get when you mix {x} and {y}?",
                        f"When you mix {x} and {y} you get {z}.",
                    )
                ],
                [(f"What color is {t}?", f"{cap(t)} is {FACTS.THING_COLOR[t]}.")],
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
                TABLES["facts"]["t7"],
                [("What are the primary colors?", "The primary colors are red, yellow and blue.")],
                [("What is water made of?", "Water is made of hydrogen and oxygen.")],
                [("What is the alphabet?", ", ".join("abcdefghijklmnopqrstuvwxyz"))],
                [(ask(r, "Write the alphabet"), ", ".join("abcdefghijklmnopqrstuvwxyz"))],
                [("At what temperature does water boil?", "Water boils at 100 degrees Celsius.")],
            ]
        )
    )


UNITS = TABLES["all"]["units"]


def fam_units(r):
    k = r.random()
    if k < 0.65:
        a, b, m = r.choice(UNITS)
        n = r.randint(1, 12) if m in (60, 24, 12, 7) else r.randint(1, 50)
        if r.random() < 0.7:
            q = r.choice(say("units.t1", n=n, a=a, b=b))
            one = {"feet": "foot", "dozen": "dozen"}.get(a, a[:-1])
            return [
                (noise(r, q), f"One {one} is {m} {b}.\n{n} x {m} = {n * m}\nSo {n} {a} are {n * m} {b}.")
            ]
        q = r.choice([f"Convert {n * m} {b} to {a}.", f"How many {a} are {n * m} {b}?"])
        one = {"feet": "foot", "dozen": "dozen"}.get(a, a[:-1])
        return [
            (noise(r, q), f"One {one} is {m} {b}.\n{n * m} / {m} = {n}\nSo {n * m} {b} are {n} {a}.")
        ]
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
                [
                    (
                        f"Convert {f} F to Celsius.",
                        f"{f} - 32 = {f - 32}\n{f - 32} x 5 / 9 = {c}\nSo {f} F is {c} C.",
                    )
                ],
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
        a = r.choice(list(FACTS.ANIMALS))
        kind, sound, baby, legs = FACTS.ANIMALS[a]
        legs_t = f"It has {DIGITS[legs]} legs." if legs else "It has no legs."
        s = (
            f"{cap(a_an(a))} is {kind}. {legs_t} "
            + (f"It can {sound}. " if not sound.startswith("make") else "")
            + f"A baby {a} is called {a_an(baby)}."
        )
        pl = TABLES["explain"]["t1"].get(a, plural(a))
        return [(r.choice(say("explain.t2", a=a, pl=pl, x1=a_an(a), x2=a_an(a))), s)]
    w = r.choice(list(FACTS.WORDS))
    d, e = FACTS.WORDS[w]
    noun = w not in "gentle brave honest curious patient generous ancient fragile silent".split()
    art = (
        a_an(w)
        if w
        not in "memory freedom courage wisdom laughter music gravity energy winter summer democracy".split()
        and noun
        else w
    )
    base = f'"{cap(w)}" means {d}.' if not noun else f"{cap(art)} is {d}."
    turns = [(r.choice(say("explain.t3", w=w) + ([f"What is {art}?"] * 2 if noun else [])), base)]
    if r.random() < 0.5:
        turns.append((ask(r, r.choice(say("explain.t4"))), e))
    if r.random() < 0.2:
        return [(ask(r, f"Write a sentence with the word {w}"), e)]
    return turns


def fam_five(r):
    cat = r.choice(list(FACTS.LISTS))
    n = r.choice([3, 4, 5, 5, 5, 6, 7])
    num = DIGITS[n] if r.random() < 0.5 else str(n)
    xs = r.sample(FACTS.LISTS[cat], n)
    style = r.choice(["bullet", "number", "comma", "number"])
    hint = {"bullet": " as a bullet list", "comma": " separated by commas", "number": ""}[style]
    out = {
        "bullet": "\n".join(f"- {x}" for x in xs),
        "number": "\n".join(f"{i}. {x}" for i, x in enumerate(xs, 1)),
        "comma": ", ".join(xs),
    }[style]
    turns = [(ask(r, r.choice(say("five.t1")).format(n=num, c=cat, h=hint)), out)]
    while r.random() < 0.35 and len(turns) < 4:
        m = r.randrange(4)
        if m == 0:
            xs = sorted(xs)
            turns.append((ask(r, "Sort them"), ", ".join(xs)))
        elif m == 1:
            turns.append(
                (ask(r, r.choice(["Write them as JSON", "Make it a JSON list"])), json.dumps(xs))
            )
        elif m == 2:
            x = r.choice([y for y in FACTS.LISTS[cat] if y not in xs] or [xs[0]])
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
    t = r.choice(list(FACTS.HOWTO))
    st = FACTS.HOWTO[t]
    turns = [(r.choice(say("howto.t1", t=t)), "\n".join(f"{i}. {s}" for i, s in enumerate(st, 1)))]
    if r.random() < 0.25:
        i = r.randint(1, len(st))
        turns.append((r.choice([f"What is step {i}?", f"Repeat step {i}."]), st[i - 1]))
    return turns


def fam_letter(r):
    a, b = r.sample(FACTS.NAMES, 2)
    day = r.choice(FACTS.DAYS)
    topics = {
        "the meeting": say("letter.t1", day=day),
        "a birthday party": say("letter.t2", day=day),
        "a thank you": say("letter.t3"),
        "being late": [f"I am sorry, but I will be late on {day}.", "Please start without me."],
        "a book": say("letter.t4"),
        "a trip": say("letter.t5", x1=r.choice(FACTS.CITIES), day=day),
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
    n, c, col, pet = (
        r.choice(FACTS.NAMES),
        r.choice(FACTS.CITIES),
        r.choice(FACTS.LISTS["colors"][:8]),
        r.choice(list(FACTS.ANIMALS)),
    )
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
    cat, other = r.sample(say("classify.t1"), 2)
    xs = r.sample(FACTS.LISTS[cat], 3)
    odd = r.choice([x for x in FACTS.LISTS[other] if x not in FACTS.LISTS[cat]])
    k = r.randrange(3)
    if k == 0:
        ys = [*xs, odd]
        r.shuffle(ys)
        return [
            (
                r.choice(["Which one does not belong: {}?", "Find the odd one out: {}"]).format(
                    ", ".join(ys)
                ),
                f"{cap(odd)} does not belong. The others are {cat}.",
            )
        ]
    if k == 1:
        return [(f"What are {join_and(xs)}?", f"They are {cat}.")]
    mood = r.choice(TABLES["classify"]["t2"])
    return [
        (
            r.choice(say("classify.t3")).format(mood[0].format(r.choice(FACTS.ITEMS))),
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
    p.add_argument(
        "--tokenizer", help="tokenizer.json; without it a text sample for train_tokenizer.py is written"
    )
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
        (f"{a.out}/{i:04d}.bin", a.seed * 100_003 + i, a.tokens_per_shard, a.tokenizer, a.raw)
        for i in range(a.shards)
    ]
    with Pool(a.workers) as pool:
        for path in pool.imap_unordered(make_shard, jobs):
            print("shard", path, flush=True)


if __name__ == "__main__":
    main()
