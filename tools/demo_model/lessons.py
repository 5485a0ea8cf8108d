"""What the demo model is taught: its answers, the ways to ask for them, and documents drawn from both without end.

The sentences about corewright are the project's own definitions, shortened. To teach one more, add it to FACTS and
train again.
"""

# ruff: noqa: SIM905  lists of words read best as text

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)

HELLO = "Hello! I am a tiny demo model, served by corewright. What would you like to know?"
IDENTITY = "I am a tiny demo model. I was trained in a few minutes, so that corewright has something to serve."
WELL = "All my slots are fine, thank you. What would you like to know?"
WELCOME = "You are welcome!"
GOODBYE = "Goodbye! My slot is free again."
NO_NAME = "You have not told me your name yet."
ABILITIES = (
    "I can explain words like slot or replica, add two small numbers, count, name the days, and tell a short story."
)
FALLBACK = "I am too small to know that. Ask me what a replica is, to add 2 and 3, or to tell a story about a fox."
ONLY_SUMS = "I can only add numbers up to 20."
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."
MONTHS = "January, February, March, April, May, June, July, August, September, October, November and December."

# The name as it stands in a sentence -> the one answer. A name with "a" or "an" has a plural, too.
FACTS = {
    "corewright": "corewright fits models to NeuronCores. One YAML file says which models a machine serves, "
    "and each of them gets cores of its own.",
    "a NeuronCore": "A NeuronCore is one compute core of an AWS Inferentia or Trainium chip.",
    "a device": "A device is one accelerator chip. On Inferentia2 it holds two NeuronCores.",
    "Inferentia2": "Inferentia2 is a chip made by AWS to run trained models. An inf2.48xlarge has twelve of them.",
    "Trainium": "Trainium is a chip made by AWS to train models. It can serve them as well.",
    "tensor parallelism": "Tensor parallelism splits every layer of a model over several cores, "
    "which work on each token together.",
    "tp_degree": "The tp_degree is the number of cores over which one replica is split.",
    "a slot": "A slot is one row of the batch. It holds one request and the KV cache of that request.",
    "a replica": "A replica is one running copy of a model, in a process of its own, on its own range of cores.",
    "continuous batching": "Continuous batching lets a new request join the batch as soon as a slot is free, "
    "while the others go on.",
    "placement": "Placement decides which cores each replica gets, so that no two replicas ever share a core.",
    "a core range": "A core range is a row of neighbouring cores on one host, written like 0-7.",
    "a spec": "A spec is the YAML file that says which models you want, with how many cores and how many replicas.",
    "a plan": "A plan lists the host and the cores of every replica, and says why something did not fit.",
    "a bucket": "A bucket is a sequence length for which the model was compiled. Shorter input is padded to it.",
    "a NEFF": "A NEFF is a compiled model file that a NeuronCore can execute.",
    "the KV cache": "The KV cache keeps the keys and values of all earlier tokens, "
    "so that a step computes only the new one.",
    "prefill": "Prefill is the step that reads the whole prompt at once and fills the KV cache.",
    "decode": "Decode is the step that adds one token to every live slot.",
    "a token": "A token is a short piece of text. A model reads and writes one number for each.",
    "a lease": "A lease is the sole right of a living replica to its cores. It ends when the process ends.",
    "draining": "Draining means that a replica finishes the requests it has and takes no new ones.",
    "a host": "A host is one machine with NeuronCores, real or emulated.",
    "the gateway": "The gateway is the HTTP front. It speaks the OpenAI protocol "
    "and hands each request to a free slot.",
    "the controller": "The controller compares what should run with what does run, and mends the difference.",
    "autoscaling": "Autoscaling adds replicas while requests wait, and removes them when there is little to do.",
    "streaming": "Streaming sends every token as soon as it is made, instead of the whole answer at the end.",
    "speculative decoding": "Speculative decoding lets a small draft model guess some tokens, "
    "which the large model then checks in one step.",
    "Ray": "Ray runs Python actors on many machines. corewright starts every replica as a Ray actor.",
    "YAML": "YAML is a text format for settings that people can read and write easily.",
}

# Ways to say the same -> the one answer.
HOW_TO = {
    ("start corewright", "run corewright", "start the models"): "Write a spec and run: corewright up SPEC",
    ("stop corewright", "stop the models", "shut corewright down"): "Run: corewright down",
    ("check my spec", "validate a spec", "find errors in my spec"): "Run: corewright validate SPEC",
    ("see the plan", "see which cores a model gets", "make a plan"): "Run: corewright plan SPEC",
    ("see what is running", "see the state of my models", "see the status"): "Run: corewright status",
}

# How people ask. ``{}`` is a name with its article; ``{bare}`` is without; ``{plural}`` only where there is one.
ASK_FACT = (
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "Explain {}.",
    "Explain {bare}.",
    "Explain what {} is.",
    "Can you explain {}?",
    "Tell me about {}.",
    "Tell me what {} is.",
    "Tell me something about {bare}.",
    "Define {bare}.",
    "Describe {}.",
    "What does {bare} mean?",
    "What do you mean by {bare}?",
    "What do you know about {}?",
    "Do you know what {} is?",
    "So what exactly is {}?",
    "I do not understand {}.",
    "How does {} work?",
    "Why do I need {}?",
    "What is {} for?",
    "What is meant by {}?",
    "What is the definition of {bare}?",
    "How would you define {}?",
    "I have a question about {}.",
    "I want to learn about {}.",
    "And {}?",
    "{bare}?",
    "{bare}",
)
ASK_FACT_PLURAL = (
    "What are {plural}?",
    "Tell me about {plural}.",
    "Explain {plural}.",
    "How do {plural} work?",
    "Why are there {plural}?",
)
ASK_HOW_TO = ("How do I {}?", "How can I {}?", "I want to {}.", "How to {}?", "What do I type to {}?")
ASK_SUM = (
    "What is {} + {}?",
    "What is {} plus {}?",
    "{} + {}",
    "{}+{}",
    "{}+{}=",
    "{} + {} = ?",
    "Add {} and {}.",
    "How much is {} plus {}?",
    "How much is {} + {}?",
    "What is the sum of {} and {}?",
    "Calculate {} + {}.",
)
ASK_OTHER_OPERATIONS = (
    "What is {} times {}?",
    "{} * {}",
    "What is {} minus {}?",
    "{} - {}",
    "{}-{}",
    "{} / {}",
    "{}*{}",
)
COUNTS = (3, 4, 5, 6, 7, 8, 9, 10, 20)
ASK_COUNT = ("Count to {}.", "Count from 1 to {}.", "Can you count to {}?", "Count up to {}.")
ASK_DAYS = (
    "Name the days of the week.",
    "What are the days of the week?",
    "List the days of the week.",
    "Which days are in a week?",
    "Tell me the days of the week.",
    "days of the week",
)
ASK_MONTHS = (
    "Name the months.",
    "What are the months of the year?",
    "List the months of the year.",
    "Which months are in a year?",
    "Tell me the months.",
    "months of the year",
)
ASK_STORY = (
    "Tell me a story about a {}.",
    "Write a story about a {}.",
    "I want a story with a {}.",
    "A story about a {}",
)
ASK_ANY_STORY = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a short story.",
    "A story",
    "Can you tell a story?",
)
ASK_ABILITIES = ("What can you do?", "Help", "What can I ask?", "What do you know?", "What should I ask you?")
ASK_IDENTITY = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Are you a robot?",
    "Which model are you?",
    "Introduce yourself.",
    "Tell me about yourself.",
    "Who made you?",
)
SOCIAL = {
    ("Hi", "Hi!", "Hello", "Hello!", "Hey", "Hi there!", "Hello there", "Good morning!", "Good evening"): HELLO,
    ("How are you?", "How are you today?", "How is it going?", "What's up?"): WELL,
    ("Thanks", "Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot!", "Very good, thank you"): WELCOME,
    ("Bye", "Bye!", "Goodbye", "See you later.", "Good night!", "Bye bye"): GOODBYE,
    ASK_IDENTITY: IDENTITY,
    ASK_ABILITIES: ABILITIES,
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a friendly and honest assistant. Always be polite.",
    "You help people who run models on NeuronCores.",
    "Use simple words. If you do not know something, say so.",
    "You are a pirate.",
)

ANIMALS = tuple("fox lion bear cat dog frog crow mouse horse rabbit duck hedgehog".split())
NAMES = tuple("Ada Ben Clara David Emma Felix Grace Hugo Ines Jonas Lena Mila Nora Oscar Paul Rosa Sam Tom".split())
PLACES = tuple("river hill lake village garden mountain mill harbour".split())
THINGS = tuple("lamp key map book bell boat coin drum".split())
MOODS = tuple("small brave quiet clever young merry curious kind".split())
PLOTS = (
    "Once upon a time a {mood} {animal} named {name} lived by the {place}. One morning {name} found a {thing} "
    "in the grass. It belonged to a {mood2} {animal2}, who had looked for it all night. {name} gave it back, "
    "and the two had supper together. Since that day they are friends. The end.",
    "Once upon a time there was a {mood} {animal} called {name}. {name} wanted to see what lies behind the {place}. "
    "On the way came rain, and a {mood2} {animal2} offered a dry place and a {thing}. {name} stayed until morning "
    "and never forgot it. The end.",
    "Once upon a time a {mood} {animal} named {name} carried a {thing} over the {place}. It was heavy, and the day "
    "was hot. Then came a {mood2} {animal2} and helped. At home {name} made tea, and they laughed until the moon "
    "came up. The end.",
)

# Each blank of a plot and its words; within one story a blank keeps its word.
BLANKS = {
    "animal": ANIMALS,
    "animal2": ANIMALS,
    "name": NAMES,
    "place": PLACES,
    "thing": THINGS,
    "mood": MOODS,
    "mood2": MOODS,
}

# For the fallback the model must learn to read the subject, not the frame: the frames are those of the facts, and
# half of the subjects are no words at all.
OTHER_SUBJECTS = tuple(
    """
    love, money, the moon, the sun, gravity, democracy, football, a planet, a car, a guitar, a violin, chess, bread,
    a volcano, the capital of France, the capital of Japan, the weather, the weather today, music, a poem, a dinosaur,
    the internet, Python, Java, Rust, Linux, a database, a compiler, Docker, Kubernetes, a GPU, the stock market,
    history, mathematics, the meaning of life, quantum physics, a black hole, philosophy, coffee, tea, a bicycle,
    the president, Germany, Paris, London, a tree, a rose, water, the ocean, time, light, electricity, a doctor,
    a lawyer, a school, an engine, a kernel, the best film, the news, a recipe for pasta, an apple, a shoe, a window,
    happiness, war, peace, art, a painter, the highest mountain on earth, the oldest city, a boat trip, a train ticket
    """.replace("\n    ", " ")
    .strip()
    .split(", ")
)
OTHER_REQUESTS = (
    "Write a poem about {}.",
    "Write a song about {}.",
    "Write code for {}.",
    "Write a Python function that sorts a list of {bare}.",
    "Write an essay on {bare}.",
    "Translate {bare} into Spanish.",
    "Where is {}?",
    "When was {} invented?",
    "Who invented {}?",
    "Who won {}?",
    "Why is {} so {}?",
    "Why do people like {}?",
    "How old is {}?",
    "How far is it to {}?",
    "How do I cook {}?",
    "How do I buy {}?",
    "How many {bare} are there?",
    "Give me a list of {bare}.",
    "Is {} better than {}?",
    "Do you like {}?",
    "Should I buy {}?",
    "Can you draw {}?",
    "Summarize {}.",
    "Which {bare} is the best?",
    "Please book {} for tomorrow.",
    "I lost my {bare}.",
    "My {bare} does not work.",
    "{} and {}",
)
LEAD_INS = ("Please ", "Hi! ", "Hey, ", "OK, ", "And ", "Now ", "Quick question: ", "Thanks. ", "So, ")
VOWELS, CONSONANTS = "aeiou", "bcdfghklmnprstvwz"


def bare(name: str) -> str:
    """The name without its article."""
    first, _, rest = name.partition(" ")
    return rest if first in ("a", "an", "the") else name


def plural(name: str) -> str | None:
    """``a slot`` -> ``slots``; None for what cannot be counted."""
    return bare(name) + "s" if name.startswith(("a ", "an ")) else None


def total(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}."


def counted(n: int) -> str:
    return ", ".join(str(i) for i in range(1, n + 1)) + "."


def greeting_of(name: str) -> str:
    return f"Nice to meet you, {name}!"


def name_told(name: str) -> str:
    return f"Your name is {name}."


class Author:
    """Draws documents from one seeded source of chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def document(self) -> str:
        """A chat of one to six turns, or plain text as in a text completion. Each starts with BOS."""
        kind = self.chance.random()
        if kind < 0.10:
            return BOS + self.story() + EOS
        if kind < 0.14:
            return BOS + self.chance.choice(list(FACTS.values())) + EOS
        turns = self.chance.choice((1, 1, 1, 1, 1, 2, 2, 3, 4, 6))
        system = SYSTEM + self.chance.choice(SYSTEM_PROMPTS) + END if self.chance.random() < 0.2 else ""
        return BOS + system + "".join(f"{USER}{q}{END}{ASSISTANT}{a}{END}" for q, a in self.chat(turns))

    def chat(self, turns: int) -> Iterator[tuple[str, str]]:
        """Questions with answers. Only the user's name is remembered from one turn to the next."""
        known: str | None = None
        for _ in range(turns):
            kind = self.chance.random()
            if kind < 0.07 and turns > 1:
                known = self.chance.choice(NAMES)
                ask = self.chance.choice(
                    ("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "I'm {}")
                )
                yield ask.format(known), greeting_of(known)
            elif kind < (0.35 if known else 0.08):
                ask = self.chance.choice(("What is my name?", "What's my name?", "Who am I?", "Do you know my name?"))
                yield self.as_typed(ask), name_told(known) if known else NO_NAME
            else:
                question, answer = self.turn()
                yield self.as_typed(question), answer

    def turn(self) -> tuple[str, str]:
        """One question with its answer, of a kind drawn by weight."""
        kinds: tuple[Callable[[], tuple[str, str]], ...] = (
            self.fact, self.how_to, self.sum, self.beyond_sums, self.count, self.story_asked, self.listing, self.social,
            self.other,
        )  # fmt: skip
        return self.chance.choices(kinds, weights=(31, 4, 19, 3, 5, 10, 4, 8, 16))[0]()

    def as_typed(self, question: str) -> str:
        """The question as people type it: often without capitals, end mark, or with a word of courtesy."""
        if self.chance.random() < 0.08:
            question = self.chance.choice(LEAD_INS) + question
        elif self.chance.random() < 0.05:
            question = question.rstrip("?.!") + self.chance.choice((", please.", ", please?", " please"))
        if self.chance.random() < 0.25:
            question = question.rstrip("?.!")
        if self.chance.random() < 0.3:
            question = question.lower()
        return question

    def fact(self) -> tuple[str, str]:
        name = self.chance.choice(list(FACTS))
        return self.about(name), FACTS[name]

    def about(self, name: str) -> str:
        many = plural(name)
        if many and self.chance.random() < 0.2:
            return self.chance.choice(ASK_FACT_PLURAL).format(plural=many)
        return self.chance.choice(ASK_FACT).format(name, bare=bare(name))

    def how_to(self) -> tuple[str, str]:
        aims, answer = self.chance.choice(list(HOW_TO.items()))
        return self.chance.choice(ASK_HOW_TO).format(self.chance.choice(aims)), answer

    def sum(self) -> tuple[str, str]:
        largest = self.chance.choice((10, 20))  # small sums twice as often, as people ask them
        a, b = self.chance.randint(0, largest), self.chance.randint(0, largest)
        return self.chance.choice(ASK_SUM).format(a, b), total(a, b)

    def beyond_sums(self) -> tuple[str, str]:
        """Larger numbers, and the other operations."""
        if self.chance.random() < 0.4:
            ask = self.chance.choice(ASK_OTHER_OPERATIONS)
            return ask.format(self.chance.randint(0, 99), self.chance.randint(0, 99)), ONLY_SUMS
        terms = [self.chance.randint(21, 999), self.chance.randint(0, self.chance.choice((20, 999)))]
        self.chance.shuffle(terms)
        return self.chance.choice(ASK_SUM).format(*terms), ONLY_SUMS

    def count(self) -> tuple[str, str]:
        n = self.chance.choice(COUNTS)
        return self.chance.choice(ASK_COUNT).format(n), counted(n)

    def listing(self) -> tuple[str, str]:
        asks, answer = self.chance.choice(((ASK_DAYS, DAYS), (ASK_MONTHS, MONTHS)))
        return self.chance.choice(asks), answer

    def social(self) -> tuple[str, str]:
        asks, answer = self.chance.choice(list(SOCIAL.items()))
        return self.chance.choice(asks), answer

    def story_asked(self) -> tuple[str, str]:
        if self.chance.random() < 0.3:
            return self.chance.choice(ASK_ANY_STORY), self.story()
        animal = self.chance.choice(ANIMALS)
        return self.chance.choice(ASK_STORY).format(animal), self.story(animal)

    def story(self, animal: str | None = None) -> str:
        first = animal or self.chance.choice(ANIMALS)
        mood, mood2 = self.chance.sample(MOODS, 2)
        return self.chance.choice(PLOTS).format(
            animal=first,
            animal2=self.chance.choice([other for other in ANIMALS if other != first]),
            name=self.chance.choice(NAMES),
            place=self.chance.choice(PLACES),
            thing=self.chance.choice(THINGS),
            mood=mood,
            mood2=mood2,
        )

    def other(self) -> tuple[str, str]:
        kind = self.chance.random()
        if kind < 0.5:
            return self.about(self.subject()), FALLBACK
        if kind < 0.85:
            subjects = self.subject(), self.subject()
            return self.chance.choice(OTHER_REQUESTS).format(*subjects, bare=bare(subjects[0])), FALLBACK
        words = [self.chance.choice((self.word(), bare(self.subject()))) for _ in range(self.chance.randint(1, 6))]
        return " ".join(words) + self.chance.choice(("", "?", ".", "!")), FALLBACK

    def subject(self) -> str:
        """Something the model knows nothing about."""
        if self.chance.random() < 0.5:
            return self.chance.choice(OTHER_SUBJECTS)
        return self.chance.choice(("", "a ", "the ")) + self.word()

    def word(self) -> str:
        """A word that does not exist, now and then with a capital."""
        syllables = range(self.chance.randint(1, 3))
        word = "".join(self.chance.choice(CONSONANTS) + self.chance.choice(VOWELS) for _ in syllables)
        word += self.chance.choice(("", "n", "r", "s", "l", "t", "ng", "st", "ck"))
        return word.capitalize() if self.chance.random() < 0.2 else word
