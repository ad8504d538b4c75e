"""Synthetic data sets drawn by this project: hand radiographs and faces in the names and layouts of the real sets.

They let everything run without a download, and they are not the real thing: whatever is made from them is marked
"synthetic".
"""

from gramgn.synthetic.datasets import AFADSynthetic, RSNASynthetic
from gramgn.synthetic.faces import Person, draw_face, make_person
from gramgn.synthetic.hands import draw_hand

__all__ = ["AFADSynthetic", "Person", "RSNASynthetic", "draw_face", "draw_hand", "make_person"]
