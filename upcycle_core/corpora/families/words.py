"""What generated tasks are about.

Few letters and words, so that a small model soon knows them and learns what is asked instead. A
tokenizer of almost any English or code has whole tokens for them.
"""

VOWELS = "a e i o u"
CONSONANTS = "b c d f g h k m"
LETTERS = "b c d f g h k m a e"
DIGITS = "0 1 2 3 4 5 6 7 8 9"
WORDS = "list name file value type set time data key line text code"
DAYS = "mon tue wed thu fri sat sun"
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec"
