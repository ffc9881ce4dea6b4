//! Every parser of bytes from outside as one function of those bytes, shared by the test on
//! a stable toolchain and the fuzz targets.
//!
//! A function returns whatever it likes to the optimizer and nothing to the caller: it
//! passes if it comes back, and asserts what must hold of anything that was accepted.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use clap::Parser as _;
use fs_err as fs;
use k3_formats::calibration::Calibration;
use k3_formats::config::ModelConfig;
use k3_formats::container::{Container, Manifest};
use k3_formats::digest::Digest;
use k3_formats::expert_table::ExpertTable;
use k3_formats::pack::{BankRecord, Checksums, Pack, PackHeader, bank_name};
use k3_formats::recipe::Recipe;
use k3_formats::safetensors_header::Header;
use k3_formats::snapshot::{WeightIndex, check_plain_name};
use k3_formats::tensor_name::{ExpertPart, dense_tensors};
use k3_formats::tokenizer::{Specials, Tokenizer};
use k3_prep::synth::Preset;
use k3_run::chat::json::{Dialect, Separators};
use k3_run::chat::{ChatRequest, Defaults, Json, Markup, ReplyParser, Start, xtml};
use k3_run::cli::{Act8, Cli};
use k3_run::engine::Engine;
use k3_run::repl::Conversation;
use k3_run::session::Session;

/// Tokens that a session has room for.
const CONTEXT: usize = 16;

/// A parser and its name.
pub(crate) type Parser = (&'static str, fn(&World, &[u8]));

/// All of them.
pub(crate) const PARSERS: [Parser; 19] = [
    ("header", header),
    ("index", index),
    ("config", config),
    ("tokenizer", tokenizer),
    ("prepared", prepared),
    ("manifest", manifest),
    ("experts", experts),
    ("container", container),
    ("chat", chat),
    ("reply", reply),
    ("json", json),
    ("session", session),
    ("conversation", conversation),
    ("evaluation", evaluation),
    ("recipe", recipe),
    ("calibration", calibration),
    ("dims", dims),
    ("pack", pack),
    ("options", options),
];

/// A good container, and what parsers need besides their bytes.
pub(crate) struct World {
    container: PathBuf,
    /// Names of the container's files in order.
    files: Vec<String>,
    config: ModelConfig,
    shard_sizes: Vec<u64>,
    tokenizer: Tokenizer,
    markup: Markup,
    scratch: PathBuf,
    runs: OnceLock<Mutex<Running>>,
}

/// An engine, and a session of it.
struct Running {
    engine: Engine<'static>,
    session: Session,
}

impl World {
    /// Reads a good container; `scratch` is a folder on the same file system.
    pub(crate) fn new(container: &Path, scratch: &Path) -> Self {
        let open = Container::open(container).expect("a good container");
        let tokenizer = Tokenizer::open_prepared(&container.join("tokenizer.bin")).expect("good");
        let entries = fs::read_dir(container).expect("a folder").map(|e| e.expect("a file"));
        let mut files: Vec<String> =
            entries.map(|e| e.file_name().into_string().expect("UTF-8")).collect();
        files.sort_unstable();
        Self {
            container: container.to_path_buf(),
            files,
            shard_sizes: open.manifest.shards.iter().map(|s| s.size).collect(),
            config: open.config,
            markup: Markup::of(&tokenizer).expect("the tokens of the chat format"),
            tokenizer,
            scratch: scratch.to_path_buf(),
            runs: OnceLock::new(),
        }
    }

    /// The engine, made when it is first asked for.
    fn running(&self) -> MutexGuard<'_, Running> {
        let make = || {
            let container = Container::open(&self.container).expect("a good container");
            // For as long as the process: the engine borrows it.
            let container: &'static Container = Box::leak(Box::new(container));
            let path = self.container.to_str().expect("UTF-8");
            let line =
                ["k3-run", "info", path, "--threads", "1", "--readers", "1", "--layers", "4"];
            let k3_run::cli::Command::Info(info) = Cli::parse_from(line).command else {
                unreachable!("info was asked for")
            };
            let engine = k3_run::open::engine(container, &info.engine, Act8::Off).expect("good");
            let session = Session::new(&engine, CONTEXT);
            Mutex::new(Running { engine, session })
        };
        self.runs.get_or_init(make).lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Good bytes for a parser, to begin from.
    pub(crate) fn seeds(&self, parser: &str, snapshot: &Path) -> Vec<Vec<u8>> {
        let read = |path: PathBuf| fs::read(path).expect("a good file");
        let head = |path: PathBuf| {
            let mut bytes = read(path);
            let size = bytes.len() as u64;
            let end = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
            bytes.truncate(end);
            bytes[..8].copy_from_slice(&size.to_le_bytes());
            bytes
        };
        match parser {
            "header" => vec![
                head(snapshot.join("model-00009-of-000010.safetensors")),
                head(self.container.join("dense-head.safetensors")),
            ],
            "index" => vec![
                br#"{"metadata":{"total_size":8},"weight_map":{"a":"x.safetensors","b.c":"y.safetensors"}}"#
                    .to_vec(),
            ],
            "config" => vec![read(snapshot.join("config.json"))],
            "tokenizer" => {
                let mut both = read(snapshot.join("tiktoken.model"));
                both.push(0xff);
                both.extend(read(snapshot.join("tokenizer_config.json")));
                vec![both]
            }
            "prepared" => {
                let mut bytes = read(self.container.join("tokenizer.bin"));
                bytes.truncate(bytes.len() - 32);
                vec![bytes]
            }
            "manifest" => vec![read(self.container.join("manifest.json"))],
            "experts" => vec![read(self.container.join("experts.k3x"))],
            "container" => (0..self.files.len() as u8)
                .map(|file| [&[file, 9, 0, 0, 0, 2], &b"\xff\0"[..]].concat())
                .collect(),
            "chat" => vec![
                br#"{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hi"}]},
                {"role":"assistant","content":null,"tool_calls":[{"id":"f:0","type":"function","function":{"name":"f","arguments":"{\"a\":[1,2.5e-7],\"b\":{}}"}}]},
                {"role":"tool","tool_call_id":"f:0","content":"ok"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
                "tool_choice":"auto","response_format":{"type":"json_object"},"thinking":true,"effort":"low"}"#
                    .to_vec(),
            ],
            "reply" => {
                let text = "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool=\"f\" index=\"0\"<|sep|>\
                    <|open|>argument key=\"a\" type=\"number\"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|end_of_msg|>";
                let ids = self.tokenizer.encode(text, Specials::Recognize);
                vec![ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect()]
            }
            "json" => vec![br#"{"a":[1,-0.5e+10,true,null,"\u00e9\n\ud83d\ude00"],"b":{"c":{}}}"#.to_vec()],
            "session" => {
                let running = &mut *self.running();
                let path = self.scratch.join("seed");
                let never = AtomicBool::new(false);
                running.session.reset();
                running.session.extend(&mut running.engine, &[5, 77], &never, |_| {}).expect("good");
                running.session.save(&running.engine, &path, "hello").expect("written");
                vec![read(path)]
            }
            "conversation" => vec![
                br#"{"version":1,"system":null,"thinking":true,"effort":"low","turns":[{"user":"a",
                "answer":{"reasoning":"b","content":"c","thinking":true,"ids":[1,2]}},{"user":"d"}]}"#
                    .to_vec(),
            ],
            "evaluation" => vec![
                br#"{"text":1}
{"tokens":3,"loss":0.5,"other_loss":0.25,"kl":0.0,"same_top":2,"worst":[]}
"#
                .to_vec(),
            ],
            "recipe" => vec![
                br#"{"bits":4,"mla_bits":8,"head_bits":16}"#.to_vec(),
                br#"{"name":"x","scales":"mse","rules":[{"class":"head","layers":"0-3","format":"int8-row"},
                {"tensor":"o_proj","format":"int4-g32"},{"format":"bf16"}]}"#
                    .to_vec(),
            ],
            "calibration" => {
                let squares = [("a.weight".to_owned(), vec![1.0, 0.0, 3.5]), ("b".to_owned(), vec![])];
                vec![Calibration::encode(77, &squares).expect("plain names")]
            }
            "dims" => vec![br#"{"layers":3,"experts":12,"hidden":192,"vocab":1024}"#.to_vec()],
            "pack" => {
                let container = Container::open(&self.container).expect("a good container");
                let (manifest, config) = (&container.manifest, &container.config);
                let header = PackHeader::new(config, &manifest.source, &manifest.shards);
                let mut text = serde_json::to_vec(&header).expect("plain data serializes");
                for layer in header.layer_range() {
                    let bank = BankRecord {
                        layer,
                        name: bank_name(layer),
                        size: header.bank_bytes(),
                        sha256: Digest::of(b"a bank"),
                        crc32: Checksums(vec![0xfeed; header.experts]),
                    };
                    text.push(b'\n');
                    text.extend(serde_json::to_vec(&bank).expect("plain data serializes"));
                }
                text.push(b'\n');
                vec![text]
            }
            "options" => [
                "rgenerate c --ram 8G -n 3 --temperature 0.5 --top-p-experts 0.9",
                "rserve c --slots 2 --host ::1 --port 0 --cors * --grace 5",
                "pconvert a b --bits 8 --shards 3-7 --jobs 2",
                "psynth a --preset real --layers 5",
            ]
            .map(|line| line.replace(' ', "\0").into_bytes())
            .to_vec(),
            other => panic!("no such parser: {other}"),
        }
    }
}

/// The first eight bytes are the size of the file, then comes the JSON.
fn header(_: &World, bytes: &[u8]) {
    let Some((size, json)) = bytes.split_first_chunk::<8>() else { return };
    let size = u64::from_le_bytes(*size);
    if let Ok(header) = Header::parse(json, size) {
        let mut at = 0;
        for tensor in &header.tensors {
            assert_eq!(tensor.begin, at, "back to back");
            at = tensor.end;
        }
        assert_eq!(header.data_start.checked_add(at), Some(size), "to the end of the file");
    }
}

fn index(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(index) = WeightIndex::parse(text) {
        for name in index.files() {
            check_plain_name(name).expect("nothing leads out of the folder");
        }
        for (tensor, shard) in index.tensors() {
            assert!(shard < index.files().len());
            assert_eq!(index.shard_of(tensor), Some(shard));
        }
    }
}

fn config(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(config) = ModelConfig::parse(text) {
        for spec in dense_tensors(&config) {
            let _ = (spec.elements(), spec.bytes(), spec.matrix_dims());
        }
        ExpertPart::ALL.iter().for_each(|part| assert!(part.bytes(&config) > 0));
    }
}

/// `tiktoken.model`, a byte 0xff, `tokenizer_config.json`.
fn tokenizer(_: &World, bytes: &[u8]) {
    let at = bytes.iter().position(|&b| b == 0xff).unwrap_or(bytes.len());
    let (model, config) = (&bytes[..at], &bytes[(at + 1).min(bytes.len())..]);
    let base = model.split(|&b| b == b'\n').filter(|line| !line.is_empty()).count();
    if let Ok(tokenizer) = Tokenizer::from_snapshot_bytes(model, config, base) {
        let again = Tokenizer::from_prepared_bytes(&tokenizer.write_prepared());
        assert!(again.is_ok(), "what was accepted can be prepared and read");
        encode(&tokenizer);
    }
}

/// A prepared tokenizer without its digest, so that damage gets past it.
fn prepared(_: &World, bytes: &[u8]) {
    let mut whole = bytes.to_vec();
    whole.extend(Digest::of(bytes).to_bytes());
    if let Ok(tokenizer) = Tokenizer::from_prepared_bytes(&whole) {
        assert!(tokenizer.write_prepared() == whole, "one tokenizer, one file");
        encode(&tokenizer);
    }
    let _ = Tokenizer::from_prepared_bytes(bytes);
}

fn encode(tokenizer: &Tokenizer) {
    let text = "The  quick\tbrown fox's 1234 灯塔\r\n\u{1f600}<|open|>";
    let ids = tokenizer.encode(text, Specials::Text);
    assert_eq!(tokenizer.decode(&ids), text, "text survives any vocabulary with all bytes");
    let _ = tokenizer.decode(&tokenizer.encode(text, Specials::Recognize));
}

fn manifest(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(manifest) = Manifest::parse(text) {
        let again = Manifest::parse(&manifest.to_text()).expect("its own text");
        assert_eq!(again, manifest);
        let _ = manifest.sums();
    }
}

fn experts(world: &World, bytes: &[u8]) {
    // At an odd address too, as bytes of a stranger may lie.
    let mut shifted = vec![0];
    shifted.extend_from_slice(bytes);
    let _ = ExpertTable::new(&shifted[1..], &world.config, &world.shard_sizes);
    if let Ok(table) = ExpertTable::new(bytes, &world.config, &world.shard_sizes) {
        for layer in world.config.moe_layers() {
            for expert in 0..world.config.moe.experts {
                for part in ExpertPart::ALL {
                    let (shard, offset) = table.entry(layer, expert).part(part);
                    assert!(offset + part.bytes(&world.config) <= world.shard_sizes[shard]);
                }
            }
        }
    }
}

/// Patches of a good container: file number, offset (four bytes), length, and that many
/// bytes to write there; without a length the file ends there.
fn container(world: &World, mut bytes: &[u8]) {
    let folder = tempfile::tempdir_in(&world.scratch).expect("a folder");
    let mut patched: Vec<Option<Vec<u8>>> = vec![None; world.files.len()];
    while let Some((head, rest)) = bytes.split_first_chunk::<6>() {
        let number = usize::from(head[0]) % world.files.len();
        let file = patched[number].get_or_insert_with(|| {
            fs::read(world.container.join(&world.files[number])).expect("a good file")
        });
        let at = u32::from_le_bytes(head[1..5].try_into().expect("four bytes")) as usize;
        let at = at % (file.len() + 1);
        let (new, rest) = rest.split_at(rest.len().min(head[5].into()));
        match new {
            [] => file.truncate(at),
            new => {
                let n = new.len().min(file.len() - at);
                file[at..at + n].copy_from_slice(&new[..n]);
            }
        }
        bytes = rest;
    }
    for (name, patched) in world.files.iter().zip(patched) {
        let path = folder.path().join(name);
        match patched {
            Some(bytes) => fs::write(path, bytes).expect("written"),
            None => fs::hard_link(world.container.join(name), path).expect("linked"),
        }
    }
    if let Ok(container) = Container::open(folder.path()) {
        for spec in dense_tensors(&container.config) {
            let _ = container.matrix(&spec.name).map(|m| (m.codes.len(), m.scales.len()));
            let _ = container.stored_bytes(&spec.name).map(|b| b.iter().max().copied());
        }
    }
    let _ = k3_run::open::tokenizer(folder.path());
}

fn chat(world: &World, bytes: &[u8]) {
    let Ok(request) = ChatRequest::from_json(bytes, Defaults::PUBLISHED) else { return };
    if let Ok(prompt) = xtml::render(&request) {
        assert!(!prompt.encode(&world.tokenizer).is_empty());
    }
}

fn reply(world: &World, bytes: &[u8]) {
    for start in [Start::Reasoning, Start::Answer] {
        let mut parser = ReplyParser::new(world.markup.clone(), start);
        let (mut events, mut reply) = (Vec::new(), k3_run::chat::Reply::default());
        for pair in bytes.as_chunks::<2>().0 {
            parser.push(&world.tokenizer, u16::from_le_bytes(*pair).into(), &mut events);
        }
        parser.finish(&mut events);
        events.iter().for_each(|event| reply.add(event));
        let _ = reply.into_message(|i| i.to_string());
    }
}

fn json(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for dialect in [Dialect::Strict, Dialect::Python] {
        let Ok(value) = Json::parse(text, dialect) else { continue };
        let printed = value.dump(Separators::COMPACT);
        let again = Json::parse(&printed, Dialect::Python);
        assert_eq!(again.as_ref(), Ok(&value), "what was printed reads as the same value");
        let _ = value.sorted();
    }
}

/// A session file, as it is and with digests that fit its damage.
fn session(world: &World, bytes: &[u8]) {
    let Running { engine, session } = &mut *world.running();
    let path = world.scratch.join("session");
    for bytes in [bytes.to_vec(), with_digests(bytes)] {
        fs::write(&path, &bytes).expect("written");
        let _ = k3_run::session::saved_tokens(&path);
        let Ok(conversation) = session.load(engine, &path) else { continue };
        let _ = Conversation::from_json(&conversation, world.config.vocab);
        assert!(session.tokens().iter().all(|&id| (id as usize) < world.config.vocab));
        assert!(session.logits().is_empty() || session.logits().len() == world.config.vocab);
        let saved = world.scratch.join("again");
        session.save(engine, &saved, &conversation).expect("what was loaded can be saved");
        assert!(fs::read(&saved).expect("a file") == bytes, "and is the same file");
        // Whatever numbers it holds, the model can go on.
        if session.tokens().len() < CONTEXT {
            let never = AtomicBool::new(false);
            session.extend(engine, &[9], &never, |_| {}).expect("room for one more");
        }
    }
}

/// Puts right the digests of a session file, as far as its sizes allow.
fn with_digests(bytes: &[u8]) -> Vec<u8> {
    const HEADER: usize = 296;
    let mut bytes = bytes.to_vec();
    if bytes.len() < HEADER {
        return bytes;
    }
    let count = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
    let latent = if bytes[14] == 1 { 2 } else { 4 };
    let sizes = [(56, 4), (64, 1), (72, 4), (80, 4), (88, latent)];
    let sizes = sizes.map(|(at, each)| count(at).saturating_mul(each));
    let mut at = HEADER;
    for (section, size) in sizes.into_iter().enumerate() {
        let end = at.saturating_add(usize::try_from(size).unwrap_or(usize::MAX)).min(bytes.len());
        let digest = Digest::of(&bytes[at..end]).to_bytes();
        bytes[104 + 32 * section..][..32].copy_from_slice(&digest);
        at = end;
    }
    let digest = Digest::of(&bytes[..HEADER - 32]).to_bytes();
    bytes[HEADER - 32..HEADER].copy_from_slice(&digest);
    bytes
}

fn conversation(world: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(talk) = Conversation::from_json(text, world.config.vocab) {
        let again = Conversation::from_json(&talk.to_json(), world.config.vocab);
        assert_eq!(again.expect("its own text"), talk);
    }
}

/// The progress file of an evaluation.
fn evaluation(world: &World, bytes: &[u8]) {
    let path = world.scratch.join("progress");
    fs::write(&path, bytes).expect("written");
    let identity = serde_json::json!({"text": 1});
    if let Ok((progress, windows)) = k3_run::eval::Progress::open(&path, &identity) {
        drop(progress);
        let (_, again) = k3_run::eval::Progress::open(&path, &identity).expect("its own file");
        assert_eq!(again.len(), windows.len());
    }
}

fn recipe(world: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(recipe) = Recipe::parse(text) {
        for spec in dense_tensors(&world.config) {
            let _ = recipe.format_of(&spec);
        }
        let written = serde_json::to_string(&recipe).expect("plain data serializes");
        assert_eq!(Recipe::parse(&written).expect("its own text"), recipe);
    }
}

fn calibration(_: &World, bytes: &[u8]) {
    if let Ok(calibration) = Calibration::parse(bytes) {
        for (name, squares) in &calibration.squares {
            let importance = calibration.importance(name, squares.len()).expect("it is there");
            assert!(importance.iter().all(|i| i.is_finite() && *i >= 0.0), "{importance:?}");
        }
    }
}

fn dims(_: &World, bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = Preset::Tiny.dims().with_json(text);
}

/// The list of banks of a pack.
fn pack(_: &World, bytes: &[u8]) {
    let Ok((whole, Some(pack))) = Pack::parse(bytes) else { return };
    assert!(whole <= bytes.len() as u64);
    assert_eq!(pack.header.difference(&pack.header), None);
    if let Ok(banks) = pack.complete() {
        assert_eq!(banks.len(), pack.header.layers);
        assert!(banks.iter().all(|bank| check_plain_name(&bank.name).is_ok()));
    }
}

/// `r` or `p` for the program, then its arguments with zeroes between them.
fn options(_: &World, bytes: &[u8]) {
    use std::os::unix::ffi::OsStringExt;
    let Some((program, rest)) = bytes.split_first() else { return };
    let arguments = rest.split(|&b| b == 0).map(|a| std::ffi::OsString::from_vec(a.to_vec()));
    let line = std::iter::once("k3".into()).chain(arguments);
    if *program == b'p' {
        let _ = k3_prep::Cli::try_parse_from(line).map_err(|e| e.render().to_string());
    } else {
        let _ = Cli::try_parse_from(line).map_err(|e| e.render().to_string());
    }
}
