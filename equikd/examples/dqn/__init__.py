"""Deep Q-learning with a target network: balance a pole on a cart, learnt from recorded transitions.

`equikd train equikd.examples.dqn` trains it in a few seconds, from 20,000 single moves in random states, and plays 64
episodes of CartPole-v1 at each eval; 500 steps are the most that one has. `configs.py` describes the experiment,
`cartpole.py` the cart, `model.py` the network and who plays by it, `step.py` the slow copy that it learns from.
"""

from equikd.examples.dqn.cartpole import fallen as fallen
from equikd.examples.dqn.cartpole import moved as moved
from equikd.examples.dqn.cartpole import starts as starts
from equikd.examples.dqn.cartpole import transitions as transitions
from equikd.examples.dqn.configs import Balancing as Balancing
from equikd.examples.dqn.configs import get_config as get_config
from equikd.examples.dqn.losses import TemporalDifference as TemporalDifference
from equikd.examples.dqn.model import Player as Player
from equikd.examples.dqn.model import QNetwork as QNetwork
from equikd.examples.dqn.step import SlowTarget as SlowTarget
from equikd.examples.dqn.step import slow_copy as slow_copy
