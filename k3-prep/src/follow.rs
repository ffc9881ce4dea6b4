//! Conversion while the download still runs: what is complete is converted, what is not is
//! waited for.

use std::path::Path;
use std::time::{Duration, Instant};

use k3_formats::calibration::Calibration;
use k3_formats::recipe::Recipe;
use k3_formats::safetensors_header::Header;
use k3_formats::snapshot::{Shard, ShardFile, Snapshot};
use k3_formats::{Error, ErrorKind, Result};
use rayon::ThreadPool;

use crate::conversion::Conversion;
use crate::output;
use crate::part::Part;
use crate::plan::ConversionPlan;
use crate::progress::Talk;

/// Longest silence while waiting.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// Converts a snapshot that grows.
pub struct Follow<'a> {
    /// Its folder, which must be there; all else may come later.
    pub snapshot: &'a Path,
    /// Where the container will be.
    pub out: &'a Path,
    /// Formats and scales.
    pub recipe: &'a Recipe,
    /// What errors are weighed by, if the recipe asks for it.
    pub calibration: Option<&'a Calibration>,
    /// Take NaN and infinite weights as 0.
    pub allow_nonfinite: bool,
    /// Whether to say how far it is.
    pub talk: Talk,
    /// Threads that quantize.
    pub pool: &'a ThreadPool,
    /// Time between two looks at the folder.
    pub every: Duration,
}

/// A shard at a look.
#[derive(Debug, Clone, PartialEq)]
enum Look {
    /// Not there, or not whole, and why.
    Waiting(String),
    /// As long as its header says, once or more.
    Whole(ShardFile),
    /// The same at two looks, so that nothing is writing to it.
    Complete(ShardFile),
}

impl Follow<'_> {
    /// Converts every dense file as its shards become complete, and returns the snapshot when
    /// all of them are. What is left to do then is [`Conversion::run`].
    ///
    /// # Errors
    /// There is no such folder, the model is another one, nothing says how many shards there
    /// will be, or a shard that is complete cannot be converted.
    pub fn run(&self) -> Result<Snapshot> {
        if !self.snapshot.is_dir() {
            return Err(Error::missing("no such folder")
                .in_file(self.snapshot)
                .hint("start the download first, or make the folder that it goes to"));
        }
        let mut looks: Vec<Look> = Vec::new();
        let mut talk = Waiting { talk: self.talk, said: None };
        loop {
            match Snapshot::open(self.snapshot) {
                Ok(snapshot) => {
                    check_countable(&snapshot)?;
                    let before = complete(&looks);
                    looks = self.look(&snapshot, &looks);
                    let now = complete(&looks);
                    if now != before {
                        self.convert(&snapshot, &now)?;
                    }
                    if now.iter().all(|&complete| complete) {
                        return Ok(snapshot);
                    }
                    talk.shards(&snapshot, &looks);
                }
                // A small file that is not there yet, or half.
                Err(e) if matches!(e.kind(), ErrorKind::Missing | ErrorKind::Malformed) => {
                    talk.say(e.to_string());
                }
                Err(e) => return Err(e),
            }
            std::thread::sleep(self.every);
        }
    }

    fn look(&self, snapshot: &Snapshot, before: &[Look]) -> Vec<Look> {
        let each = |(i, shard): (usize, &Shard)| match (&shard.found, before.get(i)) {
            (Ok(now), Some(Look::Whole(then) | Look::Complete(then))) if now == then => {
                Look::Complete(*now)
            }
            (Ok(now), _) => match Header::read(&shard.path) {
                Ok(_) => Look::Whole(*now),
                Err(error) => Look::Waiting(error.to_string()),
            },
            (Err(why), _) => Look::Waiting(format!("{}: {why}", shard.name)),
        };
        snapshot.shards.iter().enumerate().map(each).collect()
    }

    fn convert(&self, snapshot: &Snapshot, ready: &[bool]) -> Result<()> {
        let plan = self
            .pool
            .install(|| ConversionPlan::of_ready(snapshot, ready, self.recipe, self.calibration))?;
        let conversion = Conversion {
            force: false,
            allow_nonfinite: self.allow_nonfinite,
            talk: self.talk,
            pool: self.pool,
            on_file: &mut |_| Ok(()),
        };
        conversion.part(&plan, self.out, Part::Follow)?;
        Ok(())
    }
}

/// Without an index, and without names that say how many, the last shard could be any.
fn check_countable(snapshot: &Snapshot) -> Result<()> {
    if snapshot.index.is_some() || snapshot.shards.iter().all(|s| s.name.contains("-of-")) {
        return Ok(());
    }
    Err(Error::missing("nothing says how many shards there will be")
        .in_file(snapshot.file(k3_formats::snapshot::INDEX_FILE))
        .hint("download the index first, or run this without --follow when all shards are there"))
}

fn complete(looks: &[Look]) -> Vec<bool> {
    looks.iter().map(|look| matches!(look, Look::Complete(_))).collect()
}

/// Says what is waited for: when that changes, and now and then.
struct Waiting {
    talk: Talk,
    said: Option<(String, Instant)>,
}

impl Waiting {
    fn shards(&mut self, snapshot: &Snapshot, looks: &[Look]) {
        let done = complete(looks).iter().filter(|&&complete| complete).count();
        let next = looks.iter().find_map(|look| match look {
            Look::Waiting(why) => Some(why.as_str()),
            _ => None,
        });
        let next = next.map_or(String::new(), |why| format!("; next: {why}"));
        self.say(format!("{done} of {} shards are complete{next}", snapshot.shards.len()));
    }

    fn say(&mut self, line: String) {
        let silent = |(said, at): &(String, Instant)| *said == line && at.elapsed() < SAY_EVERY;
        if self.talk == Talk::Quiet || self.said.as_ref().is_some_and(silent) {
            return;
        }
        output::say(format_args!("waiting: {line}"));
        self.said = Some((line, Instant::now()));
    }
}
