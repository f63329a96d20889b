"""Word lists and small fact tables used by the procedural data generator (data.py)."""

CAPITALS = dict(
    p.split(":")
    for p in """France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Ireland:Dublin,
Austria:Vienna,Poland:Warsaw,Hungary:Budapest,Greece:Athens,Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,
Iceland:Reykjavik,Belgium:Brussels,the Netherlands:Amsterdam,Switzerland:Bern,the Czech Republic:Prague,Slovakia:Bratislava,
Romania:Bucharest,Bulgaria:Sofia,Croatia:Zagreb,Serbia:Belgrade,Ukraine:Kyiv,Turkey:Ankara,Egypt:Cairo,Morocco:Rabat,Kenya:Nairobi,
Ethiopia:Addis Ababa,Ghana:Accra,Nigeria:Abuja,Senegal:Dakar,Tunisia:Tunis,Algeria:Algiers,Uganda:Kampala,Rwanda:Kigali,
Japan:Tokyo,China:Beijing,South Korea:Seoul,India:New Delhi,Nepal:Kathmandu,Thailand:Bangkok,Vietnam:Hanoi,Indonesia:Jakarta,
Malaysia:Kuala Lumpur,the Philippines:Manila,Mongolia:Ulaanbaatar,Iran:Tehran,Iraq:Baghdad,Jordan:Amman,Lebanon:Beirut,
Canada:Ottawa,the United States:Washington D.C.,Mexico:Mexico City,Cuba:Havana,Jamaica:Kingston,Panama:Panama City,Brazil:Brasilia,
Argentina:Buenos Aires,Chile:Santiago,Peru:Lima,Colombia:Bogota,Ecuador:Quito,Uruguay:Montevideo,Venezuela:Caracas,Bolivia:Sucre,
Australia:Canberra,New Zealand:Wellington,the United Kingdom:London,Scotland:Edinburgh,Wales:Cardiff,Russia:Moscow,Estonia:Tallinn,
Latvia:Riga,Lithuania:Vilnius,Slovenia:Ljubljana,Malta:Valletta,Cyprus:Nicosia""".replace("\n", "").split(",")
)

PLANETS = {
    "Mercury": "the smallest planet and the closest one to the Sun",
    "Venus": "the hottest planet, covered in thick clouds",
    "Earth": "our home and the only planet known to have life",
    "Mars": "the red planet, cold and dusty",
    "Jupiter": "the largest planet, a gas giant with a great red spot",
    "Saturn": "a gas giant famous for its bright rings",
    "Uranus": "an ice giant that spins on its side",
    "Neptune": "a windy blue ice giant, the farthest planet from the Sun",
}

ANIMALS = {
    "dog": ("a mammal", "bark", "puppy", 4),
    "cat": ("a mammal", "meow", "kitten", 4),
    "cow": ("a mammal", "moo", "calf", 4),
    "horse": ("a mammal", "neigh", "foal", 4),
    "sheep": ("a mammal", "bleat", "lamb", 4),
    "pig": ("a mammal", "oink", "piglet", 4),
    "duck": ("a bird", "quack", "duckling", 2),
    "hen": ("a bird", "cluck", "chick", 2),
    "owl": ("a bird", "hoot", "owlet", 2),
    "frog": ("an amphibian", "croak", "tadpole", 4),
    "lion": ("a mammal", "roar", "cub", 4),
    "wolf": ("a mammal", "howl", "pup", 4),
    "bear": ("a mammal", "growl", "cub", 4),
    "goat": ("a mammal", "bleat", "kid", 4),
    "snake": ("a reptile", "hiss", "snakelet", 0),
    "bee": ("an insect", "buzz", "larva", 6),
    "spider": ("an arachnid", "make almost no sound", "spiderling", 8),
    "ant": ("an insect", "make almost no sound", "larva", 6),
    "elephant": ("a mammal", "trumpet", "calf", 4),
    "mouse": ("a mammal", "squeak", "pup", 4),
    "goose": ("a bird", "honk", "gosling", 2),
    "eagle": ("a bird", "screech", "eaglet", 2),
    "whale": ("a mammal", "sing", "calf", 0),
    "dolphin": ("a mammal", "click", "calf", 0),
    "deer": ("a mammal", "grunt", "fawn", 4),
    "swan": ("a bird", "hiss", "cygnet", 2),
    "rabbit": ("a mammal", "squeak softly", "kit", 4),
    "turtle": ("a reptile", "hiss", "hatchling", 4),
}

OPPOSITES = [
    p.split("-")
    for p in """hot-cold big-small fast-slow up-down left-right day-night open-closed happy-sad light-dark
hard-soft wet-dry full-empty high-low early-late near-far old-young long-short loud-quiet rich-poor strong-weak thick-thin wide-narrow
clean-dirty true-false first-last in-out on-off push-pull begin-end buy-sell give-take love-hate win-lose brave-afraid cheap-expensive
deep-shallow easy-difficult safe-dangerous smooth-rough tall-short sharp-dull heavy-light north-south east-west always-never""".split()
]

ELEMENTS = dict(
    p.split(":")
    for p in """hydrogen:H helium:He carbon:C nitrogen:N oxygen:O fluorine:F neon:Ne sodium:Na magnesium:Mg
aluminium:Al silicon:Si phosphorus:P sulfur:S chlorine:Cl argon:Ar potassium:K calcium:Ca iron:Fe copper:Cu zinc:Zn silver:Ag tin:Sn
gold:Au mercury:Hg lead:Pb nickel:Ni uranium:U platinum:Pt""".split()
)

CURRENCY = dict(
    p.split(":")
    for p in """Japan:yen,India:rupee,the United States:dollar,the United Kingdom:pound,France:euro,Germany:euro,
Italy:euro,Spain:euro,China:yuan,Mexico:peso,Poland:zloty,Sweden:krona,Norway:krone,Denmark:krone,Switzerland:franc,Brazil:real,
Turkey:lira,Russia:ruble,South Korea:won,Thailand:baht,Vietnam:dong,Canada:dollar,Australia:dollar""".replace(
        "\n", ""
    ).split(",")
)

CONTINENT = {
    "Europe": "France Germany Italy Spain Poland Norway Greece Portugal Austria Sweden Finland".split(),
    "Asia": "Japan China India Nepal Thailand Vietnam Mongolia Indonesia".split(),
    "Africa": "Egypt Kenya Ghana Nigeria Morocco Uganda Senegal Ethiopia".split(),
    "South America": "Brazil Argentina Chile Peru Colombia Ecuador Uruguay Bolivia".split(),
    "North America": "Canada Mexico Cuba Panama Jamaica".split(),
    "Oceania": "Australia Fiji Samoa Tonga".split(),
}

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
MIX = {
    ("red", "blue"): "purple",
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
}
THING_COLOR = dict(
    p.split(":")
    for p in """grass:green,the sky:blue,snow:white,coal:black,a lemon:yellow,a carrot:orange,blood:red,
a ripe tomato:red,a banana:yellow,the sea:blue,milk:white,an emerald:green,a ruby:red,chocolate:brown,a flamingo:pink,a raven:black,
the sun:yellow,an elephant:grey,a leaf:green,a plum:purple""".replace("\n", "").split(",")
)

WORDS = {  # word: (definition, example)
    "river": ("a long stream of water that flows to a lake or the sea", "We crossed the river on an old bridge."),
    "mountain": ("a very high hill, often with a peak", "Snow covers the mountain all year."),
    "forest": ("a large area covered with trees", "Deer live in the forest."),
    "bridge": ("a structure that carries a road over water or a valley", "The bridge is made of stone."),
    "library": ("a place that keeps books for people to read or borrow", "She studies in the library."),
    "harbor": ("a sheltered place where ships can stay", "The boats sleep in the harbor."),
    "lantern": ("a lamp with a case that can be carried", "He hung a lantern by the door."),
    "compass": ("a tool with a needle that points north", "The compass showed us the way."),
    "gentle": ("kind, soft and careful", "Be gentle with the kitten."),
    "brave": ("ready to face danger or pain without running away", "The brave girl climbed the wall."),
    "honest": ("telling the truth and not cheating", "An honest friend is a treasure."),
    "curious": ("wanting to know or learn more", "The curious boy asked many questions."),
    "patient": ("able to wait calmly", "A patient gardener waits for spring."),
    "generous": ("glad to give and share", "The generous baker gave away bread."),
    "ancient": ("very old", "They found an ancient coin."),
    "fragile": ("easy to break", "The glass is fragile."),
    "silent": ("making no sound", "The house was silent at night."),
    "algorithm": ("a list of exact steps that solves a problem", "The algorithm sorts the numbers."),
    "variable": ("a name that holds a value in a program", "The variable x holds the number five."),
    "function": ("a named piece of code that takes inputs and returns a result", "The function returns the sum."),
    "loop": ("a piece of code that repeats", "The loop runs ten times."),
    "computer": ("a machine that follows instructions to work with data", "My computer is slow today."),
    "keyboard": ("a set of keys used to type", "He types fast on the keyboard."),
    "network": ("a group of things that are connected", "The computers share a network."),
    "memory": ("the ability to remember, or the part of a computer that stores data", "She has a good memory."),
    "token": ("a small piece of text that a language model reads or writes", "The word was split into two tokens."),
    "cache": (
        "a store that keeps recent data close so that it can be used again quickly",
        "The answer came from the cache.",
    ),
    "storm": ("very bad weather with wind and rain", "The storm broke a tree."),
    "island": ("land with water all around it", "They sailed to a small island."),
    "desert": ("a dry place with little rain", "Camels cross the desert."),
    "valley": ("low land between hills or mountains", "A village lies in the valley."),
    "garden": ("a piece of ground where plants are grown", "Roses grow in the garden."),
    "market": ("a place where people buy and sell things", "We bought apples at the market."),
    "castle": ("a large strong building from long ago", "The castle stands on a hill."),
    "village": ("a small group of houses in the country", "The village has one shop."),
    "doctor": ("a person who treats sick people", "The doctor looked at his arm."),
    "teacher": ("a person who helps others to learn", "The teacher wrote on the board."),
    "baker": ("a person who makes bread and cakes", "The baker gets up early."),
    "sailor": ("a person who works on a ship", "The sailor watched the stars."),
    "friend": ("a person you like and trust", "My friend lives next door."),
    "journey": ("a trip from one place to another", "The journey took three days."),
    "secret": ("something that only few people know", "Keep the secret safe."),
    "promise": ("words that say you will surely do something", "He kept his promise."),
    "energy": ("the power to do work", "The sun gives us energy."),
    "gravity": ("the force that pulls things toward the ground", "Gravity makes the apple fall."),
    "planet": ("a large round body that moves around a star", "Mars is a planet."),
    "telescope": ("a tool that makes far things look near", "She saw the moon through a telescope."),
    "shadow": ("a dark shape made when light is blocked", "The tree throws a long shadow."),
    "echo": ("a sound that comes back to you", "We heard an echo in the cave."),
    "harvest": ("the time when crops are gathered", "The harvest was good this year."),
    "ladder": ("two long bars with steps between them, used for climbing", "He climbed the ladder."),
    "mirror": ("a surface that shows your image", "She looked in the mirror."),
    "pillow": ("a soft thing to rest your head on", "The pillow is full of feathers."),
    "winter": ("the coldest season of the year", "Lakes freeze in winter."),
    "summer": ("the warmest season of the year", "We swim in summer."),
    "democracy": ("a way of ruling where the people vote", "In a democracy people choose their leaders."),
    "freedom": ("being able to act and speak as you want", "The bird found its freedom."),
    "courage": ("the strength to do something frightening", "It takes courage to tell the truth."),
    "wisdom": ("good judgment that comes from experience", "Old people often have wisdom."),
    "laughter": ("the sound of people laughing", "Laughter filled the room."),
    "music": ("sounds arranged in a pleasant way", "They danced to the music."),
    "poem": ("a piece of writing with rhythm and often rhyme", "He wrote a poem about the sea."),
    "recipe": ("a list of steps for making food", "The recipe needs two eggs."),
    "engine": ("a machine that turns energy into motion", "The engine is loud."),
    "battery": ("a device that stores electric energy", "The battery is empty."),
    "password": ("a secret word that lets you in", "Never share your password."),
    "draft": ("a first version of something that may still change", "The draft has a few mistakes."),
    "kernel": (
        "a small program that runs on many threads of a graphics card, or the core of something",
        "The kernel adds two arrays.",
    ),
    "queue": ("a line where the first to come is the first to go", "We stood in the queue."),
    "stack": ("a pile where the last thing added is the first taken", "Put the book on the stack."),
}

LISTS = {
    "fruits": "apple banana cherry pear plum peach mango lemon orange grape kiwi melon apricot fig papaya lime raspberry strawberry".split(),
    "vegetables": "carrot potato tomato onion cabbage spinach pea bean leek broccoli pepper cucumber lettuce radish turnip celery".split(),
    "animals": list(ANIMALS),
    "colors": "red blue green yellow orange purple pink brown black white grey gold silver turquoise violet".split(),
    "birds": "eagle owl robin sparrow crow swan duck goose parrot penguin pigeon heron falcon stork gull".split(),
    "trees": "oak pine birch maple willow cedar elm ash beech palm spruce fir chestnut larch".split(),
    "flowers": "rose tulip daisy lily orchid violet sunflower poppy iris daffodil marigold lavender".split(),
    "instruments": "piano guitar violin flute drum trumpet cello harp clarinet saxophone organ banjo".split(),
    "sports": "football tennis basketball swimming running cycling hockey volleyball rowing skiing boxing golf".split(),
    "tools": "hammer saw screwdriver wrench drill pliers chisel file ruler axe shovel rake".split(),
    "drinks": "water tea coffee milk juice lemonade cocoa cider soda".split(),
    "clothes": "shirt coat hat sock shoe glove scarf dress skirt sweater jacket belt boot".split(),
    "jobs": "doctor teacher baker farmer nurse pilot sailor carpenter cook painter driver engineer writer gardener".split(),
    "vehicles": "car bus train bicycle boat plane truck tram ship scooter van helicopter".split(),
    "furniture": "table chair bed sofa desk shelf lamp wardrobe stool bench cupboard".split(),
    "programming languages": "Python C Java JavaScript Rust Go Ruby Haskell Lua Swift Kotlin Julia Perl".split(),
    "shapes": "circle square triangle rectangle oval pentagon hexagon star cube sphere cone".split(),
    "insects": "ant bee beetle butterfly moth fly mosquito wasp cricket grasshopper dragonfly ladybug".split(),
    "countries": [c for c in CAPITALS if not c.startswith("the ")],
    "cities": list(CAPITALS.values()),
    "school subjects": "math history physics biology chemistry music art geography English".split(),
    "kitchen items": "spoon fork knife plate bowl cup pan pot kettle oven whisk".split(),
    "emotions": "joy anger fear sadness surprise love hope pride shame envy calm".split(),
    "sea animals": "whale shark dolphin octopus crab lobster squid seal salmon tuna starfish jellyfish".split(),
    "desserts": "cake pie pudding cookie brownie donut muffin waffle pancake tart".split(),
}

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa Sam Tara Uma Victor Wendy
Xavier Yara Zoe Alice Bob Carol Dan Eve Frank Gina Hugo Ines Jonas Kira Lars Maya Nina Oscar Petra Ravi Sara Tom Vera Will Yusuf Lena Max
Ada Alan Grete Hans Ivan Julia Karl Lucy Marco Nora Omar Pia Rita Simon Theo Ursula Hana Kenji Mei Amir Leila Diego Elena Pablo""".split()
CITIES = [c for c in CAPITALS.values() if " " not in c]
ITEMS = """apple bread lamp chair book pencil phone cable shirt hat clock mug plate spoon ball rope candle mirror bag box brush key coin
map kite drum vase pillow blanket towel soap comb basket bottle jar knife fork ladder rug stool""".split()
NOUNS = """cat dog bird tree house river stone cloud ship road apple book lamp door garden horse king queen farmer child teacher train
window song letter hill moon star fire boat bridge clock coat cup fish flower forest friend hat island key lake market mouse night""".split()
ADJ = """red blue green old young small big tall quiet loud happy sad brave clever kind cold warm bright dark soft heavy light quick slow
shy proud golden silver strange simple busy lazy hungry tired rich poor gentle round empty""".split()
PAST = dict(
    p.split(":")
    for p in """walk:walked jump:jumped play:played look:looked help:helped open:opened close:closed paint:painted
call:called cook:cooked clean:cleaned visit:visited watch:watched carry:carried study:studied cry:cried stop:stopped plan:planned go:went
see:saw eat:ate drink:drank run:ran swim:swam write:wrote read:read sing:sang take:took give:gave make:made come:came find:found buy:bought
bring:brought think:thought teach:taught catch:caught build:built send:sent sleep:slept keep:kept know:knew grow:grew fly:flew break:broke
speak:spoke drive:drove ride:rode win:won lose:lost sell:sold tell:told hold:held leave:left meet:met sit:sat stand:stood begin:began
forget:forgot hear:heard feel:felt pay:paid say:said wear:wore""".split()
)
PLURAL = dict(
    p.split(":")
    for p in """cat:cats dog:dogs book:books car:cars tree:trees house:houses box:boxes bus:buses dish:dishes
church:churches fox:foxes class:classes baby:babies city:cities story:stories party:parties leaf:leaves wolf:wolves knife:knives life:lives
child:children man:men woman:women foot:feet tooth:teeth mouse:mice goose:geese sheep:sheep fish:fish person:people potato:potatoes
tomato:tomatoes hero:heroes boy:boys day:days key:keys toy:toys watch:watches brush:brushes glass:glasses apple:apples bird:birds
flower:flowers river:rivers star:stars lady:ladies cherry:cherries berry:berries shelf:shelves half:halves ox:oxen""".split()
)

HOWTO = {
    "make tea": [
        "Boil fresh water.",
        "Put a tea bag in a cup.",
        "Pour the hot water over it.",
        "Wait three to five minutes.",
        "Take out the bag and enjoy.",
    ],
    "make a sandwich": [
        "Take two slices of bread.",
        "Spread butter on one side.",
        "Add cheese, ham or vegetables.",
        "Put the slices together.",
        "Cut it in half and serve.",
    ],
    "boil an egg": [
        "Fill a pot with water and bring it to a boil.",
        "Lower the egg in gently.",
        "Cook it for seven to ten minutes.",
        "Cool it in cold water.",
        "Peel the egg and eat it.",
    ],
    "plant a tree": [
        "Dig a hole twice as wide as the roots.",
        "Set the tree in the hole.",
        "Fill the hole with soil.",
        "Water it well.",
        "Water it again every few days.",
    ],
    "wash your hands": [
        "Wet your hands with clean water.",
        "Add soap.",
        "Rub your hands for twenty seconds.",
        "Rinse them well.",
        "Dry them with a towel.",
    ],
    "fall asleep": [
        "Go to bed at the same time every day.",
        "Turn off all screens.",
        "Make the room dark and cool.",
        "Breathe slowly.",
        "Think of something calm.",
    ],
    "learn to code": [
        "Pick one language, such as Python.",
        "Write small programs every day.",
        "Read code that others wrote.",
        "Build a small project.",
        "Ask for help when you are stuck.",
    ],
    "clean a window": [
        "Dust the frame.",
        "Mix water with a little soap.",
        "Wipe the glass with a cloth.",
        "Dry it with paper.",
        "Polish the last spots.",
    ],
    "write a letter": [
        "Write the date at the top.",
        "Greet the person by name.",
        "Say what you want to say.",
        "Close with kind words.",
        "Sign your name.",
    ],
    "make pancakes": [
        "Mix flour, milk and eggs.",
        "Heat a pan with a little butter.",
        "Pour in some batter.",
        "Turn it when bubbles appear.",
        "Serve with syrup or fruit.",
    ],
    "change a light bulb": [
        "Switch off the light.",
        "Let the old bulb cool.",
        "Turn it to the left and take it out.",
        "Screw in the new bulb.",
        "Switch on the light.",
    ],
    "study for a test": [
        "Make a plan for the week.",
        "Read your notes.",
        "Write a short summary.",
        "Test yourself with questions.",
        "Sleep well before the test.",
    ],
    "care for a cat": [
        "Give it fresh water every day.",
        "Feed it twice a day.",
        "Clean its box.",
        "Play with it.",
        "Visit the vet once a year.",
    ],
    "fix a flat bicycle tire": [
        "Take off the wheel.",
        "Pull out the inner tube.",
        "Find the hole and patch it.",
        "Put the tube back.",
        "Pump up the tire.",
    ],
    "save money": [
        "Write down what you spend.",
        "Make a budget.",
        "Cook at home.",
        "Wait a day before you buy.",
        "Put some money aside each month.",
    ],
    "debug a program": [
        "Read the error message.",
        "Find the line that fails.",
        "Print the values around it.",
        "Change one thing at a time.",
        "Add a test so that it stays fixed.",
    ],
}

RHYMES = [
    ("sea", "free", "be", "tree", "me"),
    ("night", "light", "bright", "sight", "white"),
    ("day", "way", "play", "gray", "stay"),
    ("moon", "soon", "tune", "June", "noon"),
    ("sky", "high", "fly", "by", "why"),
    ("rain", "train", "plain", "again", "lane"),
    ("snow", "glow", "slow", "know", "go"),
    ("tall", "fall", "call", "small", "wall"),
    ("song", "long", "strong", "along", "belong"),
    ("deep", "sleep", "keep", "sheep", "leap"),
    ("gold", "old", "cold", "told", "hold"),
    ("spring", "sing", "wing", "bring", "ring"),
]
