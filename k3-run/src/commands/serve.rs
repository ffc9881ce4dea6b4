//! Serves the model over HTTP until a signal ends it.

use std::path::Path;
use std::time::Duration;

use k3_formats::{Error, text_file};

use crate::cli::ServeArgs;
use crate::open::DEFAULT_CONTEXT;
use crate::report::say;
use crate::server::{HEAD_TIME, ServeOptions, Server};
use crate::session::SessionOptions;

pub(super) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let api_keys = args.api_key_file.as_deref().map(api_keys).transpose()?.unwrap_or_default();
    let session = SessionOptions::conversation(
        args.engine.context.unwrap_or(DEFAULT_CONTEXT),
        args.checkpoints,
        args.checkpoint_dir.clone(),
        0,
    );
    let server = Server::start(ServeOptions {
        engine: args.engine.clone(),
        host: args.host,
        port: args.port,
        slots: args.slots,
        session,
        queue: args.queue,
        api_keys,
        no_auth: args.no_auth,
        cors: args.cors.clone(),
        model: args.model_name.clone(),
        comment_every: Duration::from_secs(args.keep_alive),
        head_time: HEAD_TIME,
        grace: Duration::from_secs(args.grace),
        save_dir: args.save_dir.clone(),
        signals: true,
    })?;
    say(format_args!("listening at http://{}", server.address()));
    server.join()
}

/// Keys of a file, one per line; blank lines and those that begin with # do not count.
fn api_keys(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = text_file::read(path, 1 << 20)?;
    let lines = text.lines().map(str::trim);
    let keys: Vec<String> =
        lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from).collect();
    if keys.is_empty() {
        let error = Error::missing("no API key in it").in_file(path);
        return Err(error.hint("write one key per line").into());
    }
    Ok(keys)
}
