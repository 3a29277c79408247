"""Wordings of needles for training, put together from parts: tens of thousands, so that none is learnt by heart.

An attribute ("badge number") is stated, asked for and answered in any combination of patterns; a relation ("moors the
boat at") brings phrases of its own. None of their words is in a test wording.
"""

from dataclasses import dataclass

import numpy as np

from sala.lab.eval.tasks.wordings import ANY, CODES, Wording
from sala.lab.eval.tasks.words import KeyKind, ValueKind

NUMBER: tuple[ValueKind, ...] = ("number",)
WORD: tuple[ValueKind, ...] = ("word",)


@dataclass(frozen=True)
class Attribute:
    """What someone or something has: a noun, and who can have it."""

    noun: str
    key: KeyKind
    values: tuple[ValueKind, ...]
    category: str = "common"


@dataclass(frozen=True)
class Relation:
    """What someone does or where something is: statements, questions and openings that go with each other."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    openings: tuple[str, ...]
    key: KeyKind
    values: tuple[ValueKind, ...]
    category: str = "common"


ATTRIBUTES = (
    *(Attribute(noun, "person", CODES) for noun in (
        "badge number", "membership number", "booking reference", "customer id", "gym pass", "passport number",
        "exam number", "account code", "room key", "invoice number", "case number", "player id", "insurance policy")),
    *(Attribute(noun, "person", ANY) for noun in ("login", "code name", "verification phrase", "secret answer",
                                                  "wifi password", "user name", "alias", "sign-in phrase")),
    *(Attribute(noun, "person", NUMBER) for noun in (
        "lucky number", "best score", "monthly rent", "race number", "salary", "house number", "pin", "bonus")),
    *(Attribute(noun, "person", WORD, kind) for noun, kind in (
        ("favourite dessert fruit", "fruit"), ("spirit creature", "animal"), ("first pet", "animal"),
        ("jacket colour", "colour"), ("favourite shade", "colour"), ("birthplace", "city"), ("next stop", "city"),
        ("home town", "city"), ("main instrument", "instrument"), ("dearest possession", "object"),
        ("birthday present", "object"), ("motto", "common"), ("dream", "common"), ("stage name", "common"))),
    *(Attribute(noun, "thing", CODES) for noun in (
        "serial number", "lot number", "part number", "stock code", "asset id", "barcode", "order code", "batch id",
        "model number", "reference", "registration", "checksum", "unlock sequence", "patent number")),
    *(Attribute(noun, "thing", NUMBER) for noun in ("price", "weight in grams", "year of purchase", "value in euros")),
    *(Attribute(noun, "thing", WORD, kind) for noun, kind in (
        ("lining", "colour"), ("trim", "colour"), ("engraving", "common"), ("brand", "common"), ("motif", "animal"),
        ("place of manufacture", "city"), ("scent", "fruit"), ("replacement", "object"), ("trigger", "common"))),
    *(Attribute(noun, "place", CODES) for noun in (
        "zip code", "radio frequency", "area code", "grid reference", "gate code", "weather station id", "bus line",
        "map sheet", "parcel number", "station code")),
    *(Attribute(noun, "place", NUMBER) for noun in ("population", "founding year", "number of houses", "tax revenue")),
    *(Attribute(noun, "place", WORD, kind) for noun, kind in (
        ("flag colour", "colour"), ("twin town", "city"), ("chief export", "object"), ("emblem", "common"),
        ("patron creature", "animal"), ("festival fruit", "fruit"), ("former name", "common"), ("slogan", "common"),
        ("town band's lead instrument", "instrument"))),
)  # fmt: skip

STATEMENTS = (
    "The {noun} of {owner} is {value}.",
    "{owner}'s {noun} is {value}.",
    "{value} is the {noun} of {owner}.",
    "For {owner}, the {noun} is {value}.",
    "As of today, the {noun} for {owner} reads {value}.",
    "Note: {noun} of {owner}: {value}.",
    "They gave {owner} a new {noun}, {value}, last week.",
    "If someone wants the {noun} of {owner}, say {value}.",
    "{value}, so goes the {noun} of {owner}.",
    "It says {value} where the {noun} of {owner} should be.",
    "We wrote down {value} as the {noun} of {owner}.",
    "The clerk confirmed {value} as the {noun} of {owner}.",
    "The {noun} of {owner} was set to {value} yesterday.",
    "Do not forget the {noun} of {owner}, which is {value}, before you leave.",
    "Speaking of {owner}, the {noun} turned out to be {value}.",
    "Only a few know that {value} is the {noun} of {owner}.",
    "{noun} ({owner}) = {value}.",
    "By the way, {owner} has {value} as {noun}.",
    "Out of nowhere someone shouted that {owner} has the {noun} {value}.",
    "You will find {value} given as the {noun} of {owner} in the minutes.",
    "Let it be known: {owner}, {noun} {value}.",
    "The {noun}, in the case of {owner}, remains {value}.",
    "What nobody expected was that {owner} would get {value} as {noun}.",
    "Here is a fact. The {noun} of {owner} is {value}, nothing else.",
)
QUESTIONS = (
    "What is the {noun} of {owner}?",
    "What is {owner}'s {noun}?",
    "Which {noun} does {owner} have?",
    "Tell me the {noun} of {owner}.",
    "What {noun} belongs to {owner}?",
    "Can you find the {noun} of {owner}?",
    "I need the {noun} of {owner}.",
    "{noun} of {owner}?",
    "What does the text say about the {noun} of {owner}?",
    "Look up the {noun} of {owner}.",
    "Do you remember the {noun} for {owner}?",
    "Somebody mentioned the {noun} of {owner}; what was it?",
    "With regard to {owner}, which {noun} is given?",
    "How does the {noun} of {owner} read?",
    "Please repeat the {noun} of {owner}.",
    "For {owner}, what is the {noun}?",
)
OPENINGS = (
    "The {noun} of {owner} is",
    "{owner}'s {noun} is",
    "The {noun} is",
    "It is",
    "It reads",
    "The answer is",
    "That is",
    "The text gives",
    "For {owner}, the {noun} is",
    "In the text, the {noun} of {owner} is",
    "{owner} has the {noun}",
    "As {noun} of {owner}, the text gives",
    "The {noun} given for {owner} reads",
    "According to the text, it is",
    "As {noun}, {owner} has",
    "According to the text, {owner} has the {noun}",
    "The text mentions the {noun}",
    "One reads there:",
    "Answer:",
    "Sure! The {noun} of {owner} is",
)

RELATIONS = (
    Relation(("{key} bought a {value} at the market.", "At the market, {key} paid good money for a {value}."),
             ("What did {key} buy at the market?", "Which thing did {key} pay for?"),
             ("{key} bought a", "At the market, {key} paid for a"), "person", WORD, "object"),
    Relation(("{key} flew to {value} on Monday.", "The plane that took {key} away landed in {value}."),
             ("Where did {key} fly?", "To which city did {key} travel?"),
             ("{key} flew to", "The plane with {key} landed in"), "person", WORD, "city"),
    Relation(("The jeweller engraved {value} into the {key}.", "Engraved in the {key} one can read {value}."),
             ("What is engraved in the {key}?", "What did the jeweller engrave into the {key}?"),
             ("Into the {key} the jeweller engraved", "The {key} is engraved with"), "thing", ANY),
    Relation(("{key} whispered {value} and the door swung open.", "The door swung open when {key} whispered {value}."),
             ("What did {key} whisper?", "Which whisper of {key} made the door swing open?"),
             ("{key} whispered", "The door swung open when {key} whispered"), "person", WORD),
    Relation(("The genie of the {key} appears if you say {value}.", "Say {value} and the genie of the {key} appears."),
             ("What must one say to the genie of the {key}?", "How does one call the genie of the {key}?"),
             ("To call the genie of the {key}, say", "The genie of the {key} appears at"), "thing", ANY),
    Relation(("Press {value} to start the {key}.", "The {key} starts as soon as you press {value}."),
             ("What do I press to start the {key}?", "How is the {key} started?"),
             ("To start the {key}, press", "The {key} starts with", "Press"), "thing", CODES),
    Relation(("Dial {value} for the town hall of {key}.", "The town hall of {key} picks up at {value}."),
             ("Which number must I dial for the town hall of {key}?", "How do I ring the town hall of {key}?"),
             ("For the town hall of {key}, dial", "Dial"), "place", NUMBER),
    Relation(("The baker of {key} calls his best bread {value}.", "In {key} they sell a bread named {value}."),
             ("What is the bread of {key} named?", "How does the baker of {key} call his bread?"),
             ("The bread of {key} is named", "The baker of {key} calls it"), "place", WORD),
    Relation(("{key} named the boat {value}.", "The boat of {key} was christened {value}."),
             ("How did {key} name the boat?", "What was the boat of {key} christened?"),
             ("{key} named the boat", "The boat was christened", "{key} christened the boat"), "person", WORD),
    Relation(("The dog of {key} comes if you shout {value}.", "Shout {value}, and the dog of {key} comes running."),
             ("What do you shout so that the dog of {key} comes?", "To what does the dog of {key} listen?"),
             ("The dog of {key} comes if you shout", "The dog of {key} listens to", "Shout"), "person", WORD),
    Relation(("Someone scratched {value} into the bottom of the {key}.", "On the bottom of the {key} stands {value}."),
             ("What was scratched into the bottom of the {key}?", "What stands on the bottom of the {key}?"),
             ("Into the bottom of the {key} someone scratched", "On the bottom of the {key} stands"), "thing", ANY),
    Relation(("Visitors to {key} park on lot {value}.", "In {key}, lot {value} is where visitors park."),
             ("On which lot do visitors to {key} park?", "Where do I park in {key}?"),
             ("Visitors to {key} park on lot", "In {key}, park on lot"), "place", CODES),
    Relation(("{key} ordered exactly {value} bricks.", "Exactly {value} bricks were delivered to {key}."),
             ("How many bricks did {key} order?", "How many bricks were delivered to {key}?"),
             ("The bricks that {key} ordered number", "In bricks, {key} ordered"), "person", NUMBER),
    Relation(("The tower of {key} counts {value} steps.", "It takes {value} steps to climb the tower of {key}."),
             ("How many steps has the tower of {key}?", "How many steps must one climb in {key}?"),
             ("The steps of the tower of {key} number", "In steps, the tower of {key} counts"), "place", NUMBER),
    Relation(("The {key} was hidden in {value} during the war.", "In the war, {value} was where they hid the {key}."),
             ("Where was the {key} hidden during the war?", "In which city did they hide the {key}?"),
             ("During the war the {key} was hidden in", "They hid the {key} in"), "thing", WORD, "city"),
    Relation(("{key} painted the whole kitchen {value}.", "The kitchen of {key} is {value} from floor to ceiling."),
             ("In which colour did {key} paint the kitchen?", "What colour has the kitchen of {key}?"),
             ("{key} painted the kitchen", "The kitchen of {key} is"), "person", WORD, "colour"),
    Relation(("The {key} was wrapped in {value} cloth.", "Cloth, {value} in colour, covers the {key}."),
             ("In what colour of cloth was the {key} wrapped?", "What colour is the cloth over the {key}?"),
             ("The cloth over the {key} is", "The {key} was wrapped in"), "thing", WORD, "colour"),
    Relation(("A {value} guards the well of {key}.", "The well of {key} is guarded by a {value}."),
             ("What guards the well of {key}?", "Who guards the well of {key}?"),
             ("The well of {key} is guarded by a", "What guards the well of {key} is a"), "place", WORD, "animal"),
    Relation(("{key} is afraid of nothing but a {value}.", "A {value} bit {key} long ago."),
             ("Of what is {key} afraid?", "By what was {key} bitten?"),
             ("{key} is afraid of a", "What bit {key} was a"), "person", WORD, "animal"),
    Relation(("{key} gave the {value} concert of the year.", "On stage {key} was heard with the {value}."),
             ("With which instrument was {key} heard on stage?", "What is {key} heard with?"),
             ("On stage {key} was heard with the", "{key} was heard with the"), "person", WORD, "instrument"),
    Relation(("The museum of {key} shows nothing but a {value}.", "A {value} is all that the museum of {key} shows."),
             ("What does the museum of {key} show?", "Which thing is shown in {key}?"),
             ("The museum of {key} shows a", "In {key} they show a"), "place", WORD, "object"),
    Relation(("{key} squeezed a {value} into the tea.", "The tea of {key} always tastes of {value}."),
             ("Of what does the tea of {key} taste?", "What goes into the tea of {key}?"),
             ("The tea of {key} tastes of", "Into the tea of {key} goes"), "person", WORD, "fruit"),
    Relation(("Send the file to {key} under {value}.", "Under {value} the file went to {key}."),
             ("Under what was the file sent to {key}?", "Under which reference did the file go to {key}?"),
             ("The file went to {key} under", "Send it to {key} under"), "person", CODES),
    Relation(("The vote in {key} ended with {value} in favour.", "In favour, {key} counted {value} votes."),
             ("How many votes in favour were counted in {key}?", "How many in {key} were in favour?"),
             ("The votes in favour in {key} number", "In favour, {key} counted"), "place", NUMBER),
    Relation(("{key} left a slip of paper with {value} on it.", "On the slip of paper left by {key} stood {value}."),
             ("What stood on the slip of paper of {key}?", "What did {key} leave on a slip of paper?"),
             ("On the slip of paper stood", "{key} left a slip with", "The slip of {key} says"), "person", ANY),
    Relation(("Wind the {key} and it sings {value}.", "The song of the {key} is entitled {value}."),
             ("What does the {key} sing?", "How is the song of the {key} entitled?"),
             ("The {key} sings", "The song is entitled", "The song of the {key} is entitled"), "thing", WORD),
    Relation(("{key} registered the horse as {value}.", "In the race, the horse of {key} runs as {value}."),
             ("As what did {key} register the horse?", "As what does the horse of {key} run?"),
             ("{key} registered the horse as", "The horse runs as"), "person", ANY),
    Relation(("Travellers know the inn at {key} as {value}.", "The inn at {key} goes by {value}."),
             ("As what is the inn at {key} known?", "By what does the inn at {key} go?"),
             ("The inn at {key} is known as", "Travellers know the inn at {key} as"), "place", WORD),
    Relation(("The machine printed {value} when the {key} went through.", "For the {key} the machine said {value}."),
             ("What did the machine print for the {key}?", "What was printed when the {key} went through?"),
             ("For the {key} the machine printed", "The machine printed"), "thing", ANY),
    Relation(("Turn the wheel to {value} and the bridge of {key} opens.",
              "The bridge of {key} opens if the wheel is turned to {value}."),
             ("To what must the wheel be turned at the bridge of {key}?", "How does the bridge of {key} open?"),
             ("At the bridge of {key}, turn the wheel to", "Turn the wheel to"), "place", CODES),
)  # fmt: skip


def compose(rng: np.random.Generator) -> Wording:
    """Any of them."""

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(rng.integers(len(choices)))]

    if rng.random() < len(RELATIONS) / (len(RELATIONS) + len(ATTRIBUTES)):
        relation = RELATIONS[int(rng.integers(len(RELATIONS)))]
        phrases = [pick(relation.statements), pick(relation.questions), pick(relation.openings)]
        return Wording(phrases[0], phrases[1], phrases[2], relation.key, relation.values, relation.category)
    attribute = ATTRIBUTES[int(rng.integers(len(ATTRIBUTES)))]
    phrases = [fill(pick(patterns), attribute) for patterns in (STATEMENTS, QUESTIONS, OPENINGS)]
    return Wording(phrases[0], phrases[1], phrases[2], attribute.key, attribute.values, attribute.category)


def fill(pattern: str, attribute: Attribute) -> str:
    """The pattern for this attribute, with places left for key and value."""
    owner = "the {key}" if attribute.key == "thing" else "{key}"
    text = pattern.replace("{noun}", attribute.noun).replace("{owner}", owner)
    return text if text.startswith("{") else text[0].upper() + text[1:]
