"""Simple questions that any working model answers: a quick look at what is left after a conversion or quantization."""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Question(NamedTuple):
    """A question and every spelling of its answer that is accepted."""

    text: str
    accepted: tuple[str, ...]


QUESTIONS = tuple(
    Question(text, tuple(accepted.split("|")))
    for text, accepted in (
        ("What is the capital of France?", "Paris"),
        ("Which city is the capital of Japan?", "Tokyo"),
        ("What is the capital city of Italy?", "Rome|Roma"),
        ("Name the capital of Germany.", "Berlin"),
        ("Which city is the capital of the United Kingdom?", "London"),
        ("What is the capital of Russia?", "Moscow"),
        ("What colour is the sky on a clear day?", "blue"),
        ("What colour is fresh grass?", "green"),
        ("Which colour do you get when you mix blue and yellow paint?", "green"),
        ("What colour is a ripe banana?", "yellow"),
        ("What colour is clean snow?", "white"),
        ("What is the opposite of hot?", "cold"),
        ("What is the opposite of up?", "down"),
        ("What is the opposite of empty?", "full"),
        ("Which word means the opposite of early?", "late"),
        ("How many days does a week have?", "seven|7"),
        ("How many months are there in a year?", "twelve|12"),
        ("How many hours does one day have?", "24|twenty-four|twenty four"),
        ("How many minutes make an hour?", "60|sixty"),
        ("How many legs does a spider have?", "eight|8"),
        ("How many legs does a dog usually have?", "four|4"),
        ("How many sides does a triangle have?", "three|3"),
        ("How many wheels does an ordinary bicycle have?", "two|2"),
        ("How many continents are usually counted on Earth?", "seven|7"),
        ("How much is two plus three?", "five|5"),
        ("What is ten minus four?", "six|6"),
        ("What do you get if you multiply six by seven?", "42|forty-two|forty two"),
        ("What is half of one hundred?", "50|fifty"),
        ("Which number comes right after nineteen?", "20|twenty"),
        ("Which animal says meow?", "cat|cats"),
        ("Which animal barks?", "dog|dogs"),
        ("Which farm animal gives us most of the milk we drink?", "cow|cows"),
        ("Which insect makes honey?", "bee|bees|honeybee|honeybees"),
        ("Which animal is known for its very long neck?", "giraffe|giraffes"),
        ("What is the largest animal living in the sea?", "whale|whales"),
        ("What is a young dog called?", "puppy|pup"),
        ("Who wrote Romeo and Juliet?", "Shakespeare"),
        ("Who painted the Mona Lisa?", "Leonardo|da Vinci"),
        ("Which scientist is famous for the theory of relativity?", "Einstein"),
        ("Who was the first president of the United States?", "Washington"),
        ("Who was the first person to walk on the Moon?", "Armstrong"),
        ("On which planet do we live?", "Earth"),
        ("Which planet is nearest to the Sun?", "Mercury"),
        ("Which planet of our solar system is the largest?", "Jupiter"),
        ("Which star gives the Earth its light by day?", "Sun"),
        ("What goes around the Earth about once a month and lights up the night?", "Moon"),
        ("Into what does water turn when it freezes?", "ice"),
        ("At how many degrees Celsius does water boil at sea level?", "100|hundred"),
        ("Which gas in the air do people need to breathe in to live?", "oxygen|O2"),
        ("What is the chemical formula of water?", "H2O|H₂O"),
        ("Which metal has the chemical symbol Au?", "gold"),
        ("Which organ pumps blood through the body?", "heart"),
        ("With which part of the body do we see?", "eye|eyes"),
        ("What do bees collect from flowers?", "nectar|pollen"),
        ("Which ocean lies between Europe and North America?", "Atlantic"),
        ("In which country do the pyramids of Giza stand?", "Egypt"),
        ("On which continent is Brazil?", "South America"),
        ("Which language do most people in Mexico speak?", "Spanish"),
        ("Which season comes after winter?", "spring|springtime"),
        ("On which day of the week does one wake up after Monday night?", "Tuesday"),
        ("Which month is the first of the year?", "January"),
        ("What do you hold over your head to stay dry in the rain?", "umbrella"),
        ("What do people use to cut paper?", "scissors|knife|shears"),
        ("What is frozen water that falls from the sky in flakes called?", "snow|snowflakes"),
    )
)


def score(question: Question, text: str) -> float:
    """1 if an accepted answer stands in the text as whole words, in any case; else 0."""
    return float(any(_contains(text, answer) for answer in question.accepted))


def accuracy(questions: Sequence[Question], texts: Sequence[str]) -> float:
    """The share of questions that are answered, `texts[i]` being what the model says to `questions[i]`."""
    hits = [score(question, text) for question, text in zip(questions, texts, strict=True)]
    return sum(hits) / max(1, len(hits))


def _contains(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None
