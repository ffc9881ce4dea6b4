//! What all targets share: a good container to begin from, made once per process.

use std::path::Path;
use std::sync::OnceLock;

use k3_formats::recipe::Recipe;
use k3_formats::snapshot::Snapshot;
use k3_prep::Talk;
use k3_prep::conversion::Conversion;
use k3_prep::plan::ConversionPlan;
use k3_prep::synth::{Preset, Routing, SynthOptions, write_snapshot};

#[path = "../../hostile/parsers.rs"]
mod parsers;

static WORLD: OnceLock<parsers::World> = OnceLock::new();

/// Makes the container, and writes the seeds of the corpus to the folder that `K3_SEEDS`
/// names, if it does.
pub(crate) fn init(name: &str) {
    WORLD.get_or_init(|| world(name));
}

/// Gives `bytes` to the parser `name`.
pub(crate) fn run(name: &str, bytes: &[u8]) {
    let world = WORLD.get_or_init(|| world(name));
    let parse = parsers::PARSERS.iter().find(|(n, _)| *n == name).expect("a parser").1;
    parse(world, bytes);
}

fn world(name: &str) -> parsers::World {
    let dir = std::env::temp_dir().join(format!("k3-fuzz-{name}-{}", std::process::id()));
    let (snapshot, out, scratch) = (dir.join("snapshot"), dir.join("out"), dir.join("scratch"));
    let options = SynthOptions {
        dims: Preset::Tiny.dims(),
        seed: 0,
        routing: Routing::Flat,
        sparse: false,
    };
    write_snapshot(&snapshot, &options, &|_| {}).expect("a snapshot");
    fs_err::create_dir_all(&scratch).expect("a folder");
    convert(&snapshot, &out);
    let world = parsers::World::new(&out, &scratch);
    if let Some(folder) = std::env::var_os("K3_SEEDS") {
        for (i, seed) in world.seeds(name, &snapshot).iter().enumerate() {
            fs_err::write(Path::new(&folder).join(format!("seed-{i}")), seed).expect("a seed");
        }
    }
    world
}

fn convert(snapshot: &Path, out: &Path) {
    let snapshot = Snapshot::open(snapshot).expect("a good snapshot");
    let plan = ConversionPlan::new(&snapshot, &Recipe::default()).expect("a plan");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    let on_file = &mut |_: &_| Ok(());
    Conversion { force: false, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
        .run(&plan, out)
        .expect("a container");
}
