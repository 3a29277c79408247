"""Readable prose without end: the haystack that comes with the package.

Every document is a walk through some scenes. A scene has sentences, a sentence has gaps, a gap takes one of many words.
There is no number of more than two digits and no full name in it, so that no needle is hidden there by chance.
"""

import math
import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

MAX_DICE = 1024  # throws that a document needs at most
NUM_DOCUMENTS = 640  # some 400 thousand words
PARAGRAPHS = (5, 12)  # of a document
SENTENCES = (3, 8)  # of a paragraph
MAX_WEIGHT = 100  # variants of a sentence that make it as frequent as any

GAPS = {
    "who": """the miller|the schoolteacher|the young carpenter|the harbour master|an old sailor|the baker's wife|
        the postman|the apprentice|the doctor|a travelling tinker|the night watchman|the librarian|the ferryman|
        the gardener|the organist|the youngest of the sisters|the clockmaker|a retired judge|the bricklayer|
        the beekeeper|the station master|the shepherd|the printer|her grandmother|his uncle|
        the neighbour from across the yard|the new lodger|the glazier|the stonemason|the woman who sold eggs|
        the boy with the kite|the surveyor|the cook|the painter of signs""",
    "two": """the twins|the two brothers|the fishermen|the children from the upper street|the weavers|
        the visitors|the students|the firemen|the musicians|the women at the well|the farmers|the bell ringers|
        the masons|the travellers|the neighbours""",
    "place": """the mill|the old harbour|the market square|the railway yard|the schoolhouse|the chapel|
        the lower meadow|the boathouse|the town hall|the orchard|the brickworks|the inn by the bridge|
        the lighthouse|the sawmill|the post office|the bakery|the quarry|the greenhouse|the tannery|
        the reading room|the ropewalk|the cattle pens|the bathing place""",
    "thing": """a ladder|a lantern|a broken chair|a basket of pears|a bundle of letters|a brass key|a folded map|
        a wheel of cheese|a jar of nails|a saw|a coil of rope|a wet umbrella|a sack of flour|a crate of bottles|
        an iron pot|a bag of seed|a roll of canvas|a pair of boots|a clock without hands|a box of chalk|
        a copper kettle|a stack of plates|a birdcage""",
    "food": """barley soup|rye bread|smoked fish|apple cake|boiled potatoes|onion pie|porridge with honey|
        bean stew|fresh cheese|pickled beets|roast chestnuts|plum dumplings|lentils with vinegar|buttermilk|
        a dish of mushrooms|cold ham""",
    "sky": """a fine rain|thick fog|a dry wind from the east|the first frost|heavy snow|a pale sun|
        a thunderstorm|low cloud|a warm breeze|hail|a clear and starry night|mist over the fields|a grey drizzle|
        the heat of late summer""",
    "when": """In the morning|Towards evening|On Sundays|At the end of the week|Before breakfast|
        After the harvest|In early spring|Once a month|Late at night|On the day of the fair|Just before noon|
        During the long winter|When the work was done|Every other Tuesday|In the second week of autumn|
        As soon as the shutters were open|That same afternoon|Years later""",
    "num": """two|three|four|five|six|seven|eight|nine|ten|eleven|a dozen|fifteen|twenty|thirty|forty""",
    "feel": """tired|cheerful|worried|patient|curious|proud|silent|amused|stubborn|grateful|restless|content|
        cautious|puzzled""",
    "how": """slowly|without a word|with great care|in a hurry|as if nothing had happened|for the third time|
        rather badly|with a quiet laugh|by lamplight|from memory|against all advice|one by one|a little late|
        with both hands""",
    "hue": """grey|dark green|yellow|white|brown|pale blue|red|black|rust-coloured|cream""",
    "beast": """a grey cat|two geese|the miller's dog|a lame horse|a flock of starlings|a hare|some goats|an owl|
        a heron|a fat carp|the cows|a pair of swallows|a hedgehog|the old donkey""",
    "matter": """the price of timber|the new bridge|the water in the cellar|the school roof|the price of coal|
        the broken pump|the missing ladder|the road to the coast|the church bells|a debt of long standing|
        the date of the fair|the late train|the boundary of a field|who should mend the fence|
        the state of the harbour wall""",
}  # fmt: skip

SCENES = (
    # a town
    """{when} {who} walked from {place} to {place} and carried {thing}.
    Nobody in the street paid much attention to {thing} that leaned against the wall.
    {two} talked about {matter} until the lamps were lit.
    The door of {place} was painted {hue}, and the paint had begun to peel.
    There had been talk of {matter} for {num} weeks, and still nothing was settled.
    {who} had promised to bring {thing}, but forgot it {when_low}.
    From the window of {place} you could see {num} chimneys and a strip of the river.
    A notice about {matter} hung beside the door, and the rain had washed out half of it.
    {who} counted the steps up to {place}, as always, and again there were {num} too many.
    When the bell rang, {two} put down their tools and went home {how}.
    The shop smelled of soap and paper, and {thing} stood where the counter used to be.
    For a while {who} said nothing, and then spoke of {matter} {how}.""",
    # a kitchen
    """{who} put {food} on the table and told everyone to sit down.
    The recipe for {food} was never written down; {who} cooked it {how}.
    First the onions are cut, then they are left in the pan until they are soft and golden.
    There was {food} for those who came early, and bread for those who did not.
    Salt was kept in a {hue} pot, and nobody but {who} was allowed to move it.
    {when}, the kitchen was so full of steam that one could hardly find the door.
    A good dough needs time, said {who}, and a warm place away from the draught.
    {two} ate {food} and argued about {matter}.
    If the milk has turned, it can still be used for {food}, with a little sugar.
    The oven had to be heated for {num} hours before anything went into it.
    Somebody had left {thing} on the stove, and the whole house smelled of it.""",
    # weather and land
    """{when} there was {sky}, and the road to {place} could not be used.
    The wheat stood high that year, and {two} expected a good harvest.
    After {sky} the ditches were full, and {beast} crossed the path in front of us.
    Behind {place} the land rises gently and then drops to the river.
    The river bends {num} times between here and the sea, and every bend has its own name.
    {beast} came down to the water {when_low} and drank {how}.
    In dry years the pond behind {place} shrinks until one can walk across it.
    {who} read the weather from the smoke of the chimneys and was seldom wrong.
    A row of poplars marks the old border; {num} of them are still standing.
    The soil here is heavy and {hue}, and it clings to every boot.
    {sky_cap} lay over the valley, and the bells sounded as if they were far away.
    Where the two brooks meet there is a stone on which {two} used to wash their linen.""",
    # work
    """{who} mended {thing} {how} and asked for no money.
    To sharpen a blade well, one holds it flat and draws it over the stone towards oneself.
    The machine had {num} wheels, and each of them needed oil {when_low}.
    {two} worked at {place} from dawn on, with one short rest for {food}.
    A plank that is not dry will bend, and then the whole floor has to be taken up again.
    {who} measured twice, wrote the figures on the wall in chalk, and cut {how}.
    The order was for {num} windows, all of the same size and all to be painted {hue}.
    There is a right way to tie a load, and {who} showed it to anyone who asked.
    The wages were paid {when_low}, in coins, from a small window at {place}.
    It took {num} men to lift the beam, and one to tell them where to put it.
    Old tools are often better than new ones, if somebody has looked after them.
    The plan was simple, but {matter} delayed it by {num} days.""",
    # a journey
    """The train stopped at {place} for longer than anybody could explain.
    {who} had never travelled farther than {place} and felt {feel}.
    We were {num} in the carriage, and all of us had brought {food}.
    The map was old, and {place} was not on it at all.
    {when} the coach left without {who}, who came running {how}.
    At the border they looked into every bag and found nothing but {thing}.
    The ferry makes the crossing {num} times a day, unless there is {sky}.
    Somebody in the next compartment was humming the same tune over and over.
    From the deck one saw the lights of {place}, and then only the dark water.
    The inn had one free room, with a {hue} door and a view of {place}.
    {two} shared their {food} with us and told long stories about {matter}.
    There are {num} tunnels on that line, and in the longest one the lamps are never lit.""",
    # letters and books
    """{who} wrote a letter about {matter} and never sent it.
    In the library there was a shelf for books that nobody had asked for in {num} years.
    The first page was missing, so that the story began in the middle of a quarrel.
    {who} read aloud {how}, and {two} listened.
    A pressed flower fell out of the book, {hue} and thin as paper.
    The handwriting was small, and where the ink had run one could only guess.
    {when} the newspaper wrote about {matter}, and most of it was wrong.
    {who} knew {num} poems by heart and recited them {when_low}.
    Between the pages somebody had kept a receipt for {thing}.
    Every family has a box of old photographs in which no one can name all the faces.
    The dictionary was used to keep the window open, and for little else.""",
    # school and learning
    """The lesson was about rivers, and {who} drew one on the board {how}.
    Why ice floats was explained {num} times, and {two} were still not convinced.
    A lever is a simple thing: the longer the arm, the smaller the force that is needed.
    {who} asked a question about {matter} that nobody could answer.
    For the experiment they used {thing}, a candle and a glass of water.
    The children counted {num} kinds of birds, among them some that {who} had never noticed.
    One learns to measure by measuring, said {who}, and not by talking about it.
    The globe had been repaired so often that one of the seas was {hue}.
    {when} the class went to {place} and looked at the stones in the wall.
    A seed knows which way is up, even in the dark, and that was the subject of the day.
    The bell was rung by hand, and whoever rang it felt {feel} for the rest of the morning.""",
    # home and family
    """{who} came home {feel}, took off the wet coat and sat down by the stove.
    The house has {num} rooms, and in most of them one hears the river.
    {beast} slept on the step and would not move for anybody.
    On the wall hung a picture of {place}, painted {how} by someone in the family.
    My mother used to say that {matter} would outlive us all.
    There was {thing} in the attic that belonged to no one and that no one would throw away.
    {when} we lit the lamp early and played cards for buttons.
    The youngest had lost a shoe again, and {two} went out to look for it.
    Somebody laughed in the next room, and then the clock struck {num}.
    The curtains were {hue} once; now they had the colour of weak tea.
    {who} was {feel} about {matter}, and it was better not to ask.
    At supper there was {food}, and afterwards a silence that nobody minded.""",
    # a meeting
    """The council met at {place} to decide about {matter}.
    {who} spoke first and, as some thought, for too long.
    Of those present, {num} were in favour and the rest wanted to wait.
    It was agreed that {who} should look into the matter and report {when_low}.
    {two} left before the vote, {how}.
    The minutes of the last meeting were read, corrected in {num} places and approved.
    Nobody could say who had paid for {thing}, and so the question was put off.
    A letter from {who} was read aloud; it dealt with {matter} and made everybody {feel}.
    The chairman reminded all of them that {place} had to be locked at night.
    In the end they chose the cheapest of {num} offers and regretted it within the year.""",
    # animals and garden
    """{beast} had got into the garden and eaten what was left of the lettuce.
    The bees were late that year, and {who} was {feel}.
    Roses want sun, ferns want shade, and the gooseberries want to be left alone.
    {who} planted {num} trees behind {place}, and most of them took root.
    In the nest under the roof there were {num} eggs, {hue} with small spots.
    {when} {who} walked around the beds with {thing} and looked for snails.
    {beast} watched {how} while {two} dug up the potatoes.
    A hedge has to be cut before the birds come back, or not at all.
    The well behind {place} never runs dry, not even in the hottest weeks.
    What the frost had spared was taken by {beast}.
    Compost should be turned {when_low}, and covered when there is {sky}.""",
)


def write_documents(count: int = NUM_DOCUMENTS, seed: int = 0) -> list[str]:
    """So many documents, the same ones for the same seed."""
    return [write_document(np.random.default_rng([seed, index])) for index in range(count)]


def write_document(rng: np.random.Generator) -> str:
    """Some paragraphs; each keeps to one scene, and takes a sentence the more often the more it can vary."""
    dice = iter(rng.integers(1 << 30, size=MAX_DICE).tolist())
    paragraphs = []
    for _ in range(_throw(dice, *PARAGRAPHS)):
        at = _throw(dice, 0, len(_SENTENCES))
        order = np.argsort(rng.exponential(size=len(_SENTENCES[at])) / _WEIGHTS[at])
        chosen = order[: _throw(dice, *SENTENCES)].tolist()
        paragraphs.append(" ".join(_fill(_SENTENCES[at][one], dice) for one in chosen))
    return "\n\n".join(paragraphs)


def _throw(dice: Iterator[int], start: int, stop: int) -> int:
    return start + next(dice) % (stop - start)


def _fill(parts: list[str], dice: Iterator[int]) -> str:
    """Gaps stand at the odd places."""
    out = [_choose(part, dice) if at % 2 else part for at, part in enumerate(parts)]
    text = "".join(out)
    return text[0].upper() + text[1:]


def _choose(gap: str, dice: Iterator[int]) -> str:
    name, _, form = gap.partition("_")
    words = _WORDS[name]
    word = words[next(dice) % len(words)]
    if form == "low":
        return word[0].lower() + word[1:]
    return word[0].upper() + word[1:] if form == "cap" else word


def _weigh(scene: list[list[str]]) -> NDArray[np.float64]:
    """How often each sentence is taken, against the others."""
    variants = [math.prod(len(_WORDS[gap.partition("_")[0]]) for gap in parts[1::2]) for parts in scene]
    return np.minimum(variants, MAX_WEIGHT).astype(np.float64)


_WORDS = {name: [" ".join(one.split()) for one in text.split("|")] for name, text in GAPS.items()}
_SENTENCES = [[re.split(r"\{(\w+)\}", line.strip()) for line in scene.split("\n")] for scene in SCENES]
_WEIGHTS = [_weigh(scene) for scene in _SENTENCES]
