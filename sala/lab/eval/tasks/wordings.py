"""How needles are worded, and how text and question are put before the model; train and test share no wording."""

from dataclasses import dataclass

from sala.lab.eval.tasks.words import KeyKind, Split, ValueKind

CODES: tuple[ValueKind, ...] = ("number", "uuid")
ANY: tuple[ValueKind, ...] = ("number", "word", "uuid")


@dataclass(frozen=True)
class Wording:
    """One way to say and to ask for a fact: `{key}` and `{value}` are filled in, the value ends the opened answer."""

    statement: str
    question: str
    opening: str
    key: KeyKind
    values: tuple[ValueKind, ...]
    category: str = "common"  # of word values


TRAIN = (
    Wording("The secret code of {key} is {value}.", "What is the secret code of {key}?", "The secret code of {key} is",
            "person", ANY),
    Wording("{key} can be reached by phone under {value}.", "Under which phone number can {key} be reached?",
            "{key} can be reached under", "person", ("number",)),
    Wording("To open the locker of {key}, turn the dial to {value}.",
            "Which combination opens {key}'s locker?", "The locker of {key} opens with", "person", ("number",)),
    Wording("If you ask {key} about fruit, the favourite is always {value}.", "What is the favourite fruit of {key}?",
            "The favourite fruit of {key} is", "person", ("word",), "fruit"),
    Wording("The vault of {key} lets in whoever says the access word {value}.",
            "What is the access word of the vault of {key}?", "The access word of the vault of {key} is",
            "place", ("word",)),
    Wording("One of the special magic numbers for {key} is: {value}.", "What is the special magic number for {key}?",
            "The special magic number for {key} is", "thing", ("number",)),
    Wording("One of the special magic words for the {key} is: {value}.",
            "Which special magic word was mentioned for the {key}?", "The special magic word for the {key} is",
            "thing", ("word",)),
    Wording("One of the special magic uuids for {key} is: {value}.", "What is the special magic uuid for {key}?",
            "The special magic uuid for {key} is", "thing", ("uuid",)),
    Wording("Remember this: the {key} was sold at auction for {value} dollars.",
            "For how many dollars was the {key} sold?", "In dollars, the {key} was sold for", "thing", ("number",)),
    Wording("According to the register, {value} people live in {key}.", "How many people live in {key}?",
            "The number of people who live in {key} is", "place", ("number",)),
    Wording("{key} has kept a pet for years, and it is a {value}.", "What kind of pet does {key} keep?",
            "The pet that {key} keeps is a", "person", ("word",), "animal"),
    Wording("Last spring {key} moved to {value} for good.", "Where did {key} move?",
            "The city that {key} moved to is", "person", ("word",), "city"),
    Wording("Please note that the password for the {key} has been changed to {value}.",
            "What was the password for the {key} changed to?", "The password for the {key} was changed to",
            "thing", ANY),
    Wording("Inventory tag {value} is attached to the {key}.", "Which inventory tag is attached to the {key}?",
            "The {key} carries the inventory tag", "thing", CODES),
    Wording("In the school orchestra {key} plays the {value}.", "Which instrument does {key} play in the orchestra?",
            "The instrument that {key} plays is the", "person", ("word",), "instrument"),
    Wording("Everyone in {key} paints the front door {value}, as the old law demands.",
            "In what colour are front doors painted in {key}?", "Front doors in {key} are painted", "place",
            ("word",), "colour"),
    Wording("It was {key} who took the {value} home after the party.", "What did {key} take home after the party?",
            "After the party, {key} took home the", "person", ("word",), "object"),
    Wording("The train to {key} is listed under service {value}.", "Under which service is the train to {key} listed?",
            "The train to {key} is listed as service", "place", CODES),
    Wording("{value} is the employee id that was given to {key}.", "Which employee id was given to {key}?",
            "The employee id given to {key} is", "person", CODES),
    Wording("When the guards of {key} ask for the watchword, answer {value}.",
            "How should one answer when the guards of {key} ask for the watchword?",
            "The watchword for the guards of {key} is", "place", ("word",)),
    Wording("Hidden under the {key} lies a note that reads only: {value}.",
            "What does the note under the {key} read?", "The note under the {key} reads", "thing", ANY),
    Wording("My neighbour {key} won the raffle with ticket {value}.", "With which ticket did {key} win the raffle?",
            "{key} won the raffle with ticket", "person", CODES),
    Wording("The pass token for {key} = {value}.", "pass token for {key}?", "The pass token for {key} is",
            "thing", CODES),
    Wording("The postal code of {key}, which few people know, is {value}.", "Give the postal code of {key}.",
            "The postal code of {key} is", "place", ("number",)),
    Wording("Should the alarm of the {key} go off, type {value} to silence it.",
            "What must be typed to silence the alarm of the {key}?", "To silence the alarm of the {key}, type",
            "thing", CODES),
    Wording("The winner's prize in {key} is, by tradition, a {value}.", "What is the traditional prize in {key}?",
            "By tradition the prize in {key} is a", "place", ("word",), "object"),
    Wording("Dr. {key} signed the report and filed it as number {value}.",
            "As what number did Dr. {key} file the report?", "Dr. {key} filed the report as number", "person", CODES),
    Wording("For tonight's show, the cue word of {key} will be {value}.", "Tell me the cue word of {key}.",
            "The cue word of {key} will be", "person", ("word",)),
    Wording("Shipment {value} contains nothing but the {key}.", "In which shipment is the {key}?",
            "The {key} is in shipment", "thing", CODES),
    Wording("The account balance of {key} stands at {value}.", "How high is the account balance of {key}?",
            "The account balance of {key} is", "person", ("number",)),
)  # fmt: skip

TEST = (
    Wording("Anyone calling the lighthouse at {key} must tune the transmitter to channel {value}.",
            "To which channel is the transmitter tuned for the lighthouse at {key}?",
            "For the lighthouse at {key} the channel is", "place", CODES),
    Wording("{key}'s library card bears the digits {value}.", "Which digits does the library card of {key} bear?",
            "The library card of {key} bears the digits", "person", ("number",)),
    Wording("Archaeologists catalogued the {key} with the label {value}.",
            "What label did the archaeologists put on the {key}?", "The archaeologists labelled the {key}",
            "thing", ANY),
    Wording("As a child, {key} answered to the nickname {value}.", "What was {key}'s nickname as a child?",
            "As a child, {key}'s nickname was", "person", ("word",)),
    Wording("The safe behind the {key} unlocks once {value} is entered on its keypad.",
            "What has to be entered on the keypad of the safe behind the {key}?",
            "On the keypad of the safe behind the {key}, enter", "thing", CODES),
    Wording("Farmers around {key} grow hardly anything except {value}.", "Which crop do farmers around {key} grow?",
            "The crop that farmers around {key} grow is", "place", ("word",), "fruit"),
    Wording("{value}: that is the licence plate of the van which {key} drives.",
            "What licence plate does {key}'s van have?", "The licence plate of the van {key} drives is",
            "person", CODES),
    Wording("The robot stored in the {key} obeys a single command, namely {value}.",
            "Which command does the robot in the {key} obey?", "The robot in the {key} obeys the command",
            "thing", ("word", "uuid")),
    Wording("Measured from the sea, the summit above {key} rises {value} centimetres.",
            "How many centimetres does the summit above {key} rise?",
            "In centimetres, the height of the summit above {key} is", "place", ("number",)),
    Wording("On the banner of the football club from {key} you see a {value}.",
            "Which animal is on the banner of the football club from {key}?",
            "The animal on the banner of the club from {key} is a", "place", ("word",), "animal"),
)  # fmt: skip

AURORA = Wording(
    "The secret verification code for {key} is {value}.",
    "What is the secret verification code for {key}?",
    "The secret verification code for {key} is",
    "thing",
    ("number",),
)

WORDINGS: dict[Split, tuple[Wording, ...]] = {"train": TRAIN, "test": TEST}

# A frame is the user's message around `{text}`. In training the question comes first now and then; in tests never.
FRAMES: dict[Split, tuple[str, ...]] = {
    "train": (
        "{text}\n\n{question}",
        "{text}\n\nQuestion: {question}",
        "{text}\n\nBased on the text above: {question}",
        "Read the text and answer the question at the end.\n\n{text}\n\n{question}",
        "Read the text and answer the question at the end.\n\n{text}\n\nQuestion: {question}\nAnswer:",
        "Here is a long document. Somewhere in it is what I need to know.\n\n{text}\n\n{question}",
        "<document>\n{text}\n</document>\n\n{question}",
        "<text>\n{text}\n</text>\n\nAnswer from the text only. {question}",
        "Some special facts are hidden within the following text. Memorize them. I will quiz you about them afterwards."
        "\n{text}\n\n{question}",
        "Below are several articles. One of them contains a remark that does not belong there.\n\n{text}\n\n{question}",
        "Context:\n{text}\n\nUsing the context, reply briefly.\n{question}",
        "I will paste some notes and then ask you something.\n\n{text}\n\nSo: {question}",
        "\n{text}\n\n---\n{question} Reply in one sentence.",
        "Study this carefully.\n\n{text}\n\nNow, without guessing: {question}",
        "{question}\n\n{text}",
        "I am looking for one thing in the text below: {question}\n\n{text}\n\nPlease answer now.",
        "{question} The answer is somewhere in this text.\n\n{text}\n\nAgain: {question}",
    ),
    "test": (
        "{text}\n\n\n{question}",
        "What follows is a collection of passages; a question comes after them.\n\n{text}\n\n{question}",
        "Go through these pages.\n\n[BEGIN]\n{text}\n[END]\n\nYour task: {question}",
        "Passages:\n\n{text}\n\nAccording to the passages: {question}",
    ),
}

FILLER = (
    "The grass is green and the sky is blue. The sun rises in the east and sets behind the hills. Rain fell on the "
    "roofs all through the night. A cart rolled slowly along the lane, and nobody looked up. The baker opened his "
    "shop before dawn, as he did every day. Two children were counting the boats on the river. There was a smell of "
    "hay in the air. Someone had left a gate open, and the sheep wandered off. By noon the market was full of "
    "people. The clock on the tower struck twelve. An old dog slept in the shade of the wall. Later the wind turned "
    "and brought the sound of bells. In the evening the lamps were lit one after another. Here we go, there and "
    "back again."
)
