"""The built-in environments by id. Imports nothing, so that any import order of the packages works."""

ENVS = {
    "relax_gym/GuessNumber-v0": "relax_gym_envs.guess_number:GuessNumber",
    "relax_gym/Calculator-v0": "relax_gym_envs.calculator:Calculator",
    "relax_gym/CalculatorChat-v0": "relax_gym_envs.calculator_chat:CalculatorChat",
    "relax_gym/WordProblems-v0": "relax_gym_envs.word_problems:WordProblems",
    "relax_gym/Wordle-v0": "relax_gym_envs.wordle:Wordle",
    "relax_gym/TicTacToe-v0": "relax_gym_envs.tic_tac_toe:TicTacToe",
    "relax_gym/GridWorld-v0": "relax_gym_envs.grid_world:GridWorld",
    "relax_gym/ImageGrid-v0": "relax_gym_envs.image_grid:ImageGrid",
    "relax_gym/ChartQuestion-v0": "relax_gym_envs.chart_question:ChartQuestion",
    "relax_gym/ZoomAndLook-v0": "relax_gym_envs.zoom_and_look:ZoomAndLook",
    "relax_gym/GymRender-v0": "relax_gym_envs.gym_render:GymRender",
    "relax_gym/VideoQuestion-v0": "relax_gym_envs.video_question:VideoQuestion",
    "relax_gym/AudioQuestion-v0": "relax_gym_envs.audio_question:AudioQuestion",
    "relax_gym/OmniQuestion-v0": "relax_gym_envs.omni_question:OmniQuestion",
    "relax_gym/Dataset-v0": "relax_gym_envs.dataset:DatasetEnv",
}
