"""Where published weights meet, by the names of the setting `weights`."""

from collections.abc import Callable, Mapping

from policy_trainer.config import TrainConfig, WeightsPlace
from policy_trainer.config.worker_settings import worker_settings
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.weights.directory import WeightsDirectory
from policy_trainer.weights.publication import Publisher
from policy_trainer.weights.upload import UploadedWeights
from shared.client import RefServerClient


def choose_publisher(config: TrainConfig, client: RefServerClient) -> Publisher:
    directory = RunDirectory(config.run_dir).weights
    places: Mapping[WeightsPlace, Callable[[], Publisher]] = {
        "directory": lambda: WeightsDirectory(directory),
        "server": lambda: UploadedWeights(client, directory, worker_settings(config)),
    }
    return places[config.weights]()
