"""Catalogs as rows, and the metrics of translations and of sets of samples."""

import catalogs
import pytest
import translation

CATALOG = """
msgid ""
msgstr "Language: fr"

#: app/views.py:10 app/other.py:3
msgid "The file could not be opened."
msgstr "Impossible d'ouvrir le fichier."

#. Default: "Show all of the entries"
#: app/list.py:7
msgid "label_show"
msgstr "Afficher toutes "
"les entrées"

#, fuzzy
msgid "This one is not reliable."
msgstr "Rien à voir avec cela."

msgid "%d file was removed now"
msgid_plural "%d files were removed now"
msgstr[0] "%d fichier a été supprimé"
msgstr[1] "%d fichiers ont été supprimés"

msgid "Too short here"
msgstr "Trop court ici"

msgid "Not translated at all yet."
msgstr ""

msgid "The same in both languages"
msgstr "The same in both languages"

msgid "See <a href=x>the manual</a> for more."
msgstr "Voir <a href=x>le manuel</a>."

msgid "%(a)s and %(b)s and %(c)s are given"
msgstr "%(a)s et %(b)s et %(c)s sont donnés"

#~ msgid "An obsolete entry of the list"
#~ msgstr "Une entrée obsolète de la liste"

msgctxt "menu"
msgid "A message with \\"quotes\\" and context"
msgstr "Un message avec des \\"guillemets\\""
"""


def test_plain_sentences_of_a_catalog_become_rows():
    found = list(catalogs.rows("app", {"fr.po": CATALOG}))
    assert [(row["input"], row["output"], row["file"]) for row in found] == [
        (
            "English: The file could not be opened.\nFrench:",
            " Impossible d'ouvrir le fichier.\n",
            "app/app/views.py",
        ),
        ("English: Show all of the entries\nFrench:", " Afficher toutes les entrées\n", "app/app/list.py"),
        (
            'English: A message with "quotes" and context\nFrench:',
            ' Un message avec des "guillemets"\n',
            "app/fr.po",
        ),
    ]


def test_a_message_of_two_catalogs_is_one_row():
    assert len(list(catalogs.rows("app", {"a.po": CATALOG, "b.po": CATALOG}))) == 3


def test_chrf_is_of_the_first_line():
    row = {"output": " Le fichier est introuvable.\n"}
    assert translation.chrf("", [" Le fichier est introuvable.\nEnglish: more"], row) == pytest.approx(1.0)
    assert 0.2 < translation.chrf("", [" Le dossier est vide."], row) < 0.9
    assert translation.chrf("", [""], row) == translation.chrf("", ["\n\nLe fichier"], row) == 0.0


def test_corpus_scores_are_those_of_all_lines_together():
    references = ["Le fichier est introuvable ici.", "Voulez-vous enregistrer les modifications ?"]
    assert translation.corpus_scores(references, references) == pytest.approx({"corpus_bleu": 1.0, "corpus_chrf": 1.0})
    found = translation.corpus_scores([references[0], "rien"], references)
    assert 0 < found["corpus_bleu"] < 0.6 and 0.2 < found["corpus_chrf"] < 0.8


def test_equal_samples_are_not_spread():
    assert translation.spread(["a b c"] * 4) == pytest.approx({"pair_distance": 0, "distinct": 0, "distinct_2": 0.25})
    assert translation.spread([""] * 4) == {"pair_distance": 0, "distinct": 0, "distinct_2": 0}
    assert translation.spread(["one two", "jig cap"]) == {"pair_distance": 1.0, "distinct": 1.0, "distinct_2": 1.0}
    assert translation.distinct_bigrams(["a", ""]) == 0.0
