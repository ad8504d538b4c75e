"""Synthetic data sets drawn by this project: hand radiographs and faces in the names and layouts of the real sets.

They let everything run without a download, and they are not the real thing: whatever is made from them is marked
"synthetic".
"""

from gramgn.synthetic.anatomy import CARPALS, GROWTH, RAYS
from gramgn.synthetic.bones import Hand, draw_bones, joints
from gramgn.synthetic.datasets import AFADSynthetic, RSNASynthetic
from gramgn.synthetic.faces import Person, draw_face, make_person
from gramgn.synthetic.hands import draw_hand
from gramgn.synthetic.people import FaceCase, HandCase, face_cases, hand_cases, stream

__all__ = [
    "CARPALS",
    "GROWTH",
    "RAYS",
    "AFADSynthetic",
    "FaceCase",
    "Hand",
    "HandCase",
    "Person",
    "RSNASynthetic",
    "draw_bones",
    "draw_face",
    "draw_hand",
    "face_cases",
    "hand_cases",
    "joints",
    "make_person",
    "stream",
]
