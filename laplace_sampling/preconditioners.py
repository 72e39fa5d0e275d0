from abc import ABC, abstractmethod
class Preconditioner(ABC):
    @abstractmethod
    def solve(self, v, shift): ...
