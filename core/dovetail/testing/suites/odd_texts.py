"""`TEXTS`: some 200 texts at the edges of Unicode, lines, JSON and marks, for suites of components
that read or write text. `ALIKE`: groups of texts that differ, and are equal in a short form.

Each is valid Unicode. Characters that editors change or hide are escaped.
"""

from __future__ import annotations

BOM = "\ufeff"
_BREAKS = ("\n", "\r", "\r\n", "\n\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85")
_SEPARATORS = ("\u2028", "\u2029", "\0", "\x1a", "\x7f", "\xa0", "\u3000", "\u200b", "\u2060")
_BOMS = (BOM, f"{BOM}a", f"a{BOM}", f"a{BOM}b", f"{BOM}{BOM}a", "\ufffea", "\xef\xbb\xbfa")
_COMBINING = (
    "\u0301",
    "\u0301a",
    "a\u0301\u0323b",
    "a\u0323\u0301b",
    "\u1100\u1161\u11a8",
    "\uac01",
    "\u0915\u094d\u0937",
    "\u212b\u00c5A\u030a",
    "\ufb01\ufb03",
    "\u0130i\u0307\u0131I",
    "\u1e9e\u00df\u017fs",
    "\uff21\u2460\u00bd\u00b2",
)
_EMOJI = (
    "\U0001f600",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f",
    "\u2764\ufe0e",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u200d\U0001f469\u200d",
    "\U0001f1e9\U0001f1ea\U0001f1e9",
    "1\ufe0f\u20e3",
    "\U0001f3f4\U000e0067\U000e0062\U000e007f",
    "a\ufe0f",
)
# the ends of planes, private characters, non-characters, and the neighbours of surrogates
_PLANES = (
    "\ud7ff\ue000",
    "\ufffd",
    "\ufffe\uffff",
    "\ufdd0",
    "\U00010000",
    "\U0001ffff",
    "\U0010fffd\U0010ffff",
    "\uf8ff",
    "\x80\xff\u0100",
    "\u07ff\u0800",
)
_DIRECTIONS = (
    "\u05e9\u05dc\u05d5\u05dd",
    "\u0645\u0631\u062d\u0628\u0627 123",
    "a\u202eb\u202cc",
    "\u200fa\u200e",
    "\u2067a\u2069",
    "\u0661\u0662\u0663",
)
_MARKS = (
    "<",
    "<t",
    "<tool_cal",
    "<tool_cal>",
    "<<tool_call",
    "</tool_call",
    "</tool_cal",
    "< tool_call>",
    "<tool_calls",
    "<TOOL_CALL",
    "<thin",
    "</thin",
    "<think",
    "< /think >",
    "<|",
    "<|im_star",
    "|>",
    "[TOOL_CALL",
    "[/INST",
    "<s",
    "</s",
    "<function=",
    "<function=get_wea",
    "get_wea",
    "get_weather",
    "get_weather_now",
    "GET_WEATHER",
    '{"name": "get_wea',
    '{"name": "f", "argum',
    '"arguments": {}',
    "``",
    "```json",
)
_SPACES = (
    " ",
    "  ",
    "   a",
    "a   ",
    " a ",
    "\t",
    "\ta\t\tb\t",
    "a \n b",
    "a\n\n\nb",
    " \n",
    "\n ",
    "a \t \r\n",
    "a" + " " * 40 + "b",
    "\n" * 30,
    "\t" * 20,
    " \t" * 10,
)
_NUMBERS = (
    "0",
    "007",
    "1234567890" * 3,
    "18446744073709551616",
    "9007199254740993",
    "-0.0",
    "1e999",
    "1,234.50",
    "0x1F",
    "3.14159265358979",
    "NaN",
    "-Infinity",
)
_ESCAPES = (
    "\\",
    "\\\\",
    '\\"',
    "\\n",
    "\\u0041",
    "\\ud83d\\ude00",
    "\\ud83d",
    "\\x00",
    "\\/",
    '"',
    "'",
    '""',
    '{"a": "b\\"c\\\\"}',
    "{}",
    "[]",
    "null",
    "None",
    "true",
    "{",
    "}",
    "{{a}}",
    "{% raw %}",
    "%s %d",
    "$a ${b}",
    "a\\",
    "\\\n",
)
_ENTITIES = (
    "&",
    "&amp;",
    "&amp;amp;",
    "&lt;tool_call&gt;",
    "&#60;",
    "&#x3C;",
    "&#0;",
    "&nbsp;",
    "&unknown;",
    "&amp",
    "<!-- a -->",
    "<![CDATA[a]]>",
    "<?xml?>",
    "<br/>",
    "a%20b",
    "=?utf-8?q?a?=",
)
_LONG = (
    "a" * 300,
    "ab" * 200,
    "\u6f22" * 100,
    "\U0001f600" * 50,
    "e\u0301" * 80,
    "Donaudampfschifffahrtsgesellschaft" * 8,
    "-" * 150,
    "https://example.org/" + "a/" * 60,
    "aB" * 70,
    "\u0e01\u0e34" * 60,
)
_WORDS = (
    "a",
    "A",
    "\u00e9",
    "\u00c9",
    "don't",
    "Hello, world!",
    "na\u00efve caf\u00e9",
    "\u6f22\u5b57\u304b\u306a",
    "\ud55c\uad6d\uc5b4",
    "\u0e44\u0e17\u0e22",
    "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0395\u03bb\u03bb\u03ac\u03b4\u03b1\u03c2\u03c3",
    "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\u201ca\u201d \u2018b\u2019 \u2026 \u2013",
    "a_b-c.d",
    "snake_case CamelCase",
    "aaa aa a",
    "x = y ** 2  # z",
)
TEXTS: tuple[str, ...] = tuple(
    dict.fromkeys(
        (
            *_BOMS,
            *(f"a{mark}b" for mark in (*_BREAKS, *_SEPARATORS)),
            *(f"{mark}a{mark}" for mark in (*_BREAKS, *_SEPARATORS)),
            *_COMBINING,
            *_EMOJI,
            *_PLANES,
            *_DIRECTIONS,
            *_MARKS,
            *_SPACES,
            *_NUMBERS,
            *_ESCAPES,
            *_ENTITIES,
            *_LONG,
            *_WORDS,
        )
    )
)

# of 32 bits, each pair found by trying "text 0", "text 1" …
_EQUAL_HASHES = (
    ("text 29685295", "text 32060020"),  # CRC-32
    ("text 120", "text 201"),  # Adler-32
    ("text 79568", "text 664010"),  # FNV-1a
    ("text 51847", "text 130841"),  # the first 32 bits of MD5
    ("text 8456", "text 34903"),  # the last
    ("text 72345", "text 90975"),  # of SHA-1
    ("text 31179", "text 53348"),
    ("text 859", "text 4460"),  # of SHA-256
    ("text 16521", "text 49739"),
    ("text 16404", "text 47693"),  # of BLAKE2b
    ("text 46919", "text 62150"),
    ("text 99019", "text 139493"),  # of SHA-512
    ("text 29189", "text 38536"),
)
_EQUAL_FORMS = (
    ("ab", "ba"),
    ("a", "A"),
    ("a", " a", "a ", "a\n", "\ta", "a\0", f"{BOM}a", "a\u200b", "a\u2028"),
    ("a b", "a  b", "ab", "a\xa0b", "a\u2003b", "a_b"),
    ("a\nb", "a\r\nb", "a\rb", "a\n\nb"),
    ("\xe9", "e\u0301", "e"),
    ("\ufb01", "fi"),
    ("\xdf", "ss", "SS"),
    ("1", "\uff11", "01", "1.0", "\u0661"),
    ("a", "\u0161", "\U00010061"),  # equal in the lower 8 or 16 bits
    ("\u2764", "\u2764\ufe0f"),
    ('{"a": 1}', '{"a":1}', "{'a': 1}"),
    ("&lt;", "<"),
)
# the places of the one character by which texts of these lengths differ
_PLACES = tuple(
    (length, place)
    for length in (17, 65, 257, 1_025, 4_097)
    for place in (0, length // 2, length - 1)
)
ALIKE: tuple[tuple[str, ...], ...] = (
    *_EQUAL_HASHES,
    *_EQUAL_FORMS,
    *(
        tuple("-" * place + char + "-" * (length - place - 1) for char in "ab")
        for length, place in _PLACES
    ),
)
