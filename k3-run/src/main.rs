use std::process::ExitCode;

fn main() -> ExitCode {
    k3_run::run(std::env::args_os())
}
