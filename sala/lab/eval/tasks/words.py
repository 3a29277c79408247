"""The vocabulary of the needles: who or what is asked about (keys) and what is hidden (values).

Key words are split by their hash: no adjective, noun, given name, surname or place of a train key is in a test key.
"""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np

Split = Literal["train", "test"]
KeyKind = Literal["person", "thing", "place"]
ValueKind = Literal["number", "word", "uuid"]

GIVEN_NAMES = """
Maria Tomas Ingrid Kwame Leila Pavel Yuki Amara Diego Freya Hassan Olga Ravi Sofia Emeka Noor Bram Celeste Dmitri Elif
Farid Greta Hugo Ilse Jonas Keiko Lars Mina Nadia Oskar Priya Quentin Rosa Stefan Thea Umar Vera Wanda Xavier Yara
Zoltan Agnes Boris Clara Dario Edith Felix Gloria Henrik Irene Jasper Katya Lionel Mabel Nestor Odette Percy Ramona
Selim Tilda Ulrich Viola Walter Xenia Yusuf Zelda Anselm Bianca Cyril Delia Ernest Fatima Gideon Harriet Imre Judith
Kasimir Lucia Marek Ninette Orlando Petra Rufus Saskia Tariq Ursula Viktor Winifred Abel Brigitte Caspar Dorothea
Elias Florian Gustav Hedwig Ivo Josephine Kofi Lorenzo Matilda Nikolai Ottilie Pascal Renata Sigrid Thaddeus Valentina
Wendell Zuzana
"""
SURNAMES = """
Lindholm Okafor Petrov Tanaka Moreau Castellan Brandt Haddad Novak Silveira Achterberg Balogun Carrow Dunmore Eklund
Fontaine Galloway Hartmann Ishikawa Jansen Kowalski Lefebvre Mbeki Nakamura Oyelaran Pellegrin Quist Rosendahl
Sorensen Takahashi Urquhart Valdez Wexford Yilmaz Zielinski Abernathy Bellweather Cordova Drummond Esterhazy Fairbank
Gruber Holloway Ivanova Joubert Kaminski Lachance Marchetti Nyberg Ostrowski Pemberton Quigley Ravenscroft Steiner
Thackeray Ullman Vandermeer Whitlock Yamada Zapata Ashdown Birkeland Crane Dashwood Engstrom Ferreira Greenaway
Hawthorne Ibarra Jardine Kessler Lockhart Montague Northcote Ollivier Prescott Rutherford Sandoval Tremaine Underhill
Vasquez Winterbourne Ainsley Bouchard Calloway Devereux Ellsworth Figueroa Garrick Halvorsen Iqbal Jernigan Kirkwood
Lysander Merriweather
"""
ADJECTIVES = """
amber brittle crimson dusty emerald feathered gilded hollow ivory jagged knotted lacquered mossy narrow oaken painted
quilted rusted silver tarnished velvet woven yellow ancient blue carved dented embroidered faded glazed humming inlaid
jewelled lopsided marbled nickel orange patched quiet rough scarlet tall umber varnished wooden azure brass copper
dappled enamelled folding green heavy indigo lavender muted olive polished ragged striped turquoise weathered battered
coral spotted plaid pewter slender stout crooked frosted braided speckled hammered lilac bronze sapphire tilted waxed
"""
NOUNS = """
lantern violin compass teapot ledger anvil basket candle drum easel flute goblet hammer inkwell jar kettle loom mirror
needle oar pendulum quill ribbon saddle telescope umbrella vase wagon anchor bell chisel dagger envelope feather globe
harp icon jug kite lute mask napkin ornament parasol quiver rudder sundial tapestry urn valise whistle abacus bucket
cauldron dresser footstool gramophone hourglass iron kimono locket mandolin notebook ocarina puppet rucksack sextant
thimble tripod trumpet watch wheelbarrow accordion birdcage chandelier doormat fiddle gauntlet helmet jigsaw ladle
metronome nutcracker pitcher rake scabbard spindle tankard tuba wardrobe zither bassoon cradle decanter flagpole
spyglass
"""
PLACE_STEMS = """
Bracken Elder Thorn Marl Wind Hazel Raven Stone Alder Copper Dun Fern Glen Heath Iron Juniper Kest Lark Mere Nettle
Oak Pine Quarrel Rush Silver Tarn Ulver Vale Whit Yarrow Ash Birch Clover Drake Ember Fal Gorse Hollin Ivel Jarrow
Kell Linden Moss North Otter Penn Rook Sedge Teasel Under Vint Willow Amble Bram Cold Dray East Frost Gran Harrow Ink
Jessa Kirk Lom Mill Nor Orch Pel Rill Swan Tor Umber Vex West Yew Bar Cress Dapple Ellis Fox Gander Holm Isen Lang
Mallow Nun Osier
"""
PLACE_ENDINGS = """
ford wick holm bury stead combe dale field gate haven mouth bridge minster worth ley thorpe mere hurst cross by
"""
COMMON_WORDS = """
meadow harbour thunder pepper saffron walnut glacier pelican marble orchid tornado biscuit lagoon falcon cinnamon
granite hickory jasmine kernel lobster magnet nutmeg oyster pebble quartz raisin sparrow tulip vanilla walrus yoghurt
zebra acorn badger cactus dolphin eclipse fennel gazelle hamster island jungle koala lemon mustard nebula octopus
parsley rabbit salmon tiger urchin velour willow almond beetle canyon daisy ember forest ginger heron iguana jackal
ketchup lizard mango noodle otter panda radish scallop tundra vulture wombat apricot bamboo cobalt desert eagle fossil
goblin hornet icicle jaguar kiwi lily maple nectar onyx poplar reef sequoia turnip valley whale amethyst breeze cloud
dune estuary fjord geyser hazel ivy juniper lichen monsoon nightingale opal prairie ravine sunrise thistle volcano
waterfall avalanche boulder comet dragonfly everest firefly gravel honey ibis jellyfish lava moonlight oasis planet
rainbow starling twilight vineyard windmill blossom cedar driftwood evening flamingo garden horizon iceberg kestrel
lynx mushroom nugget orchard porcupine raven seashell toucan violet weasel barley clover dandelion elbow fiddlehead
grapefruit hedgehog inlet
"""
CATEGORIES = {
    "fruit": """apple pear plum cherry mango papaya fig quince apricot banana kiwi lychee guava peach nectarine melon
        grape orange tangerine pomegranate persimmon raspberry blueberry cranberry gooseberry pineapple coconut lime""",
    "animal": """badger otter heron tortoise ferret hedgehog parrot donkey goat llama peacock rabbit goose gecko raven
        hamster mule swan turtle falcon pony squirrel magpie crab hound lynx alpaca owl toad pigeon""",
    "colour": """crimson teal ochre indigo maroon beige turquoise magenta violet olive scarlet lavender amber navy coral
        ivory khaki lilac mustard peach silver emerald salmon charcoal cobalt rust mint plum""",
    "city": """Lisbon Nairobi Osaka Bergen Quito Krakow Hanoi Tunis Denver Valencia Riga Perth Lima Ghent Seville Dakar
        Turin Leipzig Bogota Mumbai Porto Helsinki Accra Montreal Busan Galway Tbilisi Cusco Malmo Izmir""",
    "instrument": """cello oboe banjo harp trombone clarinet sitar ukulele viola bassoon flute tuba xylophone harmonica
        piano guitar accordion mandolin lute saxophone bagpipes marimba theremin zither""",
    "object": """umbrella telescope typewriter chessboard rope ladder lamp blanket shovel radio camera anvil barrel
        bicycle hammock teapot compass drum mirror sewing-machine globe wheelbarrow tent canoe kettle clock""",
}


def in_split(word: str, split: Split) -> bool:
    """Every word (or text) belongs to one split, by its hash: about one in four to the test."""
    return (zlib.crc32(word.encode()) % 4 == 0) == (split == "test")


@cache
def key_words(kind: KeyKind, split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """First and second halves of the keys; only the endings of place names are shared by the splits."""
    first, second = {
        "person": (GIVEN_NAMES, SURNAMES),
        "thing": (ADJECTIVES, NOUNS),
        "place": (PLACE_STEMS, PLACE_ENDINGS),
    }[kind]
    firsts = tuple(word for word in first.split() if in_split(word, split))
    seconds = tuple(word for word in second.split() if kind == "place" or in_split(word, split))
    return firsts, seconds


def draw_keys(kind: KeyKind, split: Split, count: int, rng: np.random.Generator) -> list[str]:
    """`count` different keys: "Maria Lindholm", "amber lantern", "Thornwick"."""
    first, second = key_words(kind, split)
    joint = "" if kind == "place" else " "
    chosen = rng.choice(len(first) * len(second), size=count, replace=False)
    return [first[pair // len(second)] + joint + second[pair % len(second)] for pair in chosen.tolist()]


def count_keys(kind: KeyKind, split: Split) -> int:
    first, second = key_words(kind, split)
    return len(first) * len(second)


@cache
def words_of(category: str) -> tuple[str, ...]:
    return tuple((COMMON_WORDS if category == "common" else CATEGORIES[category]).split())


def draw_values(kind: ValueKind, category: str, count: int, rng: np.random.Generator) -> list[str]:
    """`count` different values; words come from `category` ("common" or a name in CATEGORIES)."""
    if kind == "word":
        words = words_of(category)
        return [words[index] for index in rng.choice(len(words), size=count, replace=False).tolist()]
    draw = DRAW[kind]
    values: dict[str, None] = {}
    while len(values) < count:
        values[draw(rng)] = None
    return list(values)


def _draw_number(rng: np.random.Generator) -> str:
    num_digits = int(rng.integers(4, 9))
    return str(rng.integers(10 ** (num_digits - 1), 10**num_digits))


def _draw_uuid(rng: np.random.Generator) -> str:
    """A short code of hex digits: 6 or 8 of them, or two groups as in a UUID."""
    digits = rng.bytes(6).hex()
    shapes = (digits[:6], digits[:8], f"{digits[:4]}-{digits[4:8]}", f"{digits[:8]}-{digits[8:]}")
    return shapes[int(rng.integers(len(shapes)))]


DRAW: dict[ValueKind, Callable[[np.random.Generator], str]] = {"number": _draw_number, "uuid": _draw_uuid}
