//! Sessions: whatever is reused, undone, restored or loaded, the logits are those of a
//! fresh prefill of the same tokens, bit for bit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use k3_formats::container::Container;
use k3_formats::digest::Digest;
use k3_formats::recipe::Recipe;
use k3_formats::tokenizer::{Specials, Tokenizer};
use k3_run::chat::{ChatRequest, Content, Defaults, Message, xtml};
use k3_run::engine::{Cancelled, Engine, Want};
use k3_run::open;
use k3_run::session::{Advance, Part, Session, SessionOptions, step};
use k3_run::speculate::{DraftStats, Drafter, decode};
use tempfile::TempDir;

use crate::support::{TinyK3, convert, demo_container, engine};

/// Tokens taken through the layers together.
const CHUNK: usize = 16;

/// The demo model, converted.
struct Demo {
    dir: TempDir,
    container: Container,
    tokenizer: Tokenizer,
}

impl Demo {
    fn new() -> Self {
        let dir = demo_container();
        let out = dir.path().join("container");
        let container = Container::open(&out).unwrap();
        let tokenizer = open::tokenizer(&out).unwrap();
        Self { dir, container, tokenizer }
    }

    fn engine(&self) -> Engine<'_> {
        engine(&self.container, &["--chunk", &CHUNK.to_string()])
    }
}

/// A conversation whose replies are kept as the ids that the model chose.
#[derive(Default)]
struct Conversation {
    messages: Vec<Message>,
    replies: Vec<Option<Vec<u32>>>,
}

impl Conversation {
    fn say(&mut self, text: &str) {
        self.messages.push(Message::user(text));
        self.replies.push(None);
    }

    fn until(&self, messages: usize) -> Self {
        let (all, replies) = (&self.messages, &self.replies);
        Self { messages: all[..messages].to_vec(), replies: replies[..messages].to_vec() }
    }

    fn answered(&mut self, prompt: &[u32], reply: &[u32], end: u32) {
        let content = Content::default();
        let (reasoning, tool_calls, name) = (String::new(), Vec::new(), None);
        self.messages.push(Message::Assistant { content, reasoning, tool_calls, name });
        let open = prompt.iter().rposition(|&id| id == end).unwrap() + 1;
        self.replies.push(Some([&prompt[open..], reply, &[end]].concat()));
    }

    /// Ids, and where messages begin.
    fn prompt(&self, tokenizer: &Tokenizer) -> (Vec<u32>, Vec<usize>) {
        let request = ChatRequest::new(self.messages.clone(), Defaults::ENCODER);
        let recorded = |message: usize| self.replies[message].as_deref();
        let ids = xtml::render(&request).unwrap().encode_with(tokenizer, recorded);
        let end = tokenizer.special_id("<|end_of_msg|>").unwrap();
        let turns = (1..ids.len()).filter(|&i| ids[i - 1] == end).collect();
        (ids, turns)
    }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

fn best(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as u32
}

fn fresh(engine: &mut Engine<'_>, ids: &[u32]) -> Vec<u32> {
    let mut session = Session::new(engine, ids.len());
    bits(session.extend(engine, ids, &AtomicBool::new(false), |_| {}).unwrap())
}

fn advance(
    session: &mut Session,
    engine: &mut Engine<'_>,
    prompt: &(Vec<u32>, Vec<usize>),
) -> Advance {
    let cancel = AtomicBool::new(false);
    session.advance_to(engine, &prompt.0, &prompt.1, &cancel, |_| {}).unwrap()
}

/// A greedy reply of `count` tokens; the last one is not taken in.
fn reply(session: &mut Session, engine: &mut Engine<'_>, count: usize) -> Vec<u32> {
    let mut ids = vec![best(session.logits())];
    let mut drafter = Drafter::new(0);
    while ids.len() < count {
        let (next, cancel) = (ids[ids.len() - 1], AtomicBool::new(false));
        let choose = |logits: &[f32]| Ok(Some(best(logits)));
        let chosen = decode(session, engine, next, &mut drafter, &cancel, choose).unwrap();
        ids.push(chosen.unwrap());
    }
    ids
}

/// Takes in one chunk of the prompt and gives the next one up after a few layers.
fn cancelled_advance(
    session: &mut Session,
    engine: &mut Engine<'_>,
    prompt: &(Vec<u32>, Vec<usize>),
) {
    let cancel = AtomicBool::new(false);
    let mut last = Advance { total: 0, reused: 0, done: 0, under_way: 0 };
    let advanced = session.advance_to(engine, &prompt.0, &prompt.1, &cancel, |advance| {
        last = advance;
        let second_chunk = advance.done == advance.reused + CHUNK;
        cancel.store(second_chunk && advance.under_way > 3, Ordering::Relaxed);
    });
    assert!(advanced.unwrap_err().is::<Cancelled>());
    assert!(last.done == last.reused + CHUNK && (4..8).contains(&last.under_way), "{last:?}");
}

const SAID: [&str; 10] = [
    "Good morning. Who lives at Longbourn?",
    "And what does Mrs. Bennet think of the weather?",
    "Tell me more.",
    "Is Mr. Darcy proud, or only shy in company that he does not know?",
    "Why?",
    "Let us walk to Meryton; the officers are said to be in town.",
    "What did Lydia say?",
    "I am not surprised at all.",
    "Shall we have the carriage?",
    "Good night.",
];

/// How a session is kept, and what that must save.
struct Keeping {
    checkpoints: usize,
    in_files: bool,
    undo_rows: usize,
    save_and_load: bool,
}

/// Ten turns with two cancelled prompts and an edited message. `fresh` knows the logits.
fn ten_turns(demo: &Demo, keeping: &Keeping, mut fresh: impl FnMut(&[u32]) -> Vec<u32>) {
    let mut engine = demo.engine();
    let end = demo.tokenizer.special_id("<|end_of_msg|>").unwrap();
    let options = SessionOptions {
        context: 600,
        checkpoints: keeping.checkpoints,
        checkpoint_dir: keeping.in_files.then(|| demo.dir.path().to_owned()),
        undo_rows: keeping.undo_rows,
    };
    let mut session = Session::with_options(&engine, &options).unwrap();
    let mut talk = Conversation::default();
    // Where each message of the user begins, less the token that ends the one before.
    let mut begins = Vec::new();
    for (turn, said) in SAID.into_iter().enumerate() {
        let here = session.tokens().len();
        begins.push(here);
        talk.say(said);
        let prompt = talk.prompt(&demo.tokenizer);
        let mut reusable = here;
        if turn == 3 || turn == 7 {
            cancelled_advance(&mut session, &mut engine, &prompt);
            reusable = match keeping {
                Keeping { undo_rows: 1.., .. } => here + CHUNK,
                Keeping { checkpoints: 1.., .. } => here,
                _ => 0,
            };
        }
        if turn == 5 {
            let mut edited = talk.until(8);
            edited.say("How so?");
            let prompt = edited.prompt(&demo.tokenizer);
            reusable = session.checkpoints().filter(|&c| c <= begins[4]).max().unwrap_or(0);
            assert!(keeping.checkpoints == 0 || reusable >= begins[3], "edited: {reusable}");
            assert_eq!(advance(&mut session, &mut engine, &prompt).reused, reusable, "edited");
            assert_eq!(bits(session.logits()), fresh(&prompt.0), "edited");
            // The way back to the message as it was is just as long.
            reusable = session.checkpoints().filter(|&c| c <= begins[4]).max().unwrap_or(0);
        }
        assert_eq!(session.reusable(&prompt.0), reusable, "turn {turn}");
        let advance = advance(&mut session, &mut engine, &prompt);
        let total = prompt.0.len();
        assert_eq!(
            advance,
            Advance { total, reused: reusable, done: total, under_way: 0 },
            "turn {turn}"
        );
        assert_eq!(session.tokens(), prompt.0);
        assert_eq!(bits(session.logits()), fresh(&prompt.0), "turn {turn}");
        if keeping.save_and_load && turn % 3 == 0 {
            let path = demo.dir.path().join("saved");
            session.save(&engine, &path, "what was said").unwrap();
            session = Session::with_options(&engine, &options).unwrap();
            assert_eq!(session.load(&engine, &path).unwrap(), "what was said");
        }
        let said = reply(&mut session, &mut engine, 6);
        talk.answered(&prompt.0, &said, end);
    }
}

#[test]
fn ten_turns_are_as_fresh_however_the_session_is_kept() {
    let demo = Demo::new();
    let mut engine = demo.engine();
    let mut known = HashMap::new();
    let mut fresh =
        |ids: &[u32]| known.entry(ids.to_vec()).or_insert_with(|| fresh(&mut engine, ids)).clone();
    for (checkpoints, in_files, undo_rows, save_and_load) in [
        (0, false, 0, false),
        (0, false, 8, false),
        (3, false, 0, false),
        (3, true, 0, false),
        (2, false, 3, false),
        (2, true, 8, true),
    ] {
        let keeping = Keeping { checkpoints, in_files, undo_rows, save_and_load };
        ten_turns(&demo, &keeping, &mut fresh);
    }
}

#[test]
fn a_reply_given_up_half_way_goes_on_where_it_was() {
    let demo = Demo::new();
    let mut engine = demo.engine();
    let prompt = demo.tokenizer.encode(SAID[3], Specials::Text);
    let options = |undo_rows| SessionOptions { context: 100, undo_rows, ..Default::default() };
    let whole = {
        let mut session = Session::with_options(&engine, &options(0)).unwrap();
        advance(&mut session, &mut engine, &(prompt.clone(), Vec::new()));
        reply(&mut session, &mut engine, 12)
    };
    for undo_rows in [0, 1, 8] {
        let mut session = Session::with_options(&engine, &options(undo_rows)).unwrap();
        advance(&mut session, &mut engine, &(prompt.clone(), Vec::new()));
        let said = reply(&mut session, &mut engine, 5);
        let cancel = AtomicBool::new(true);
        let part = Part { session: &mut session, ids: &said[4..], want: Want::Last };
        let error = step(&mut engine, &mut [part], &cancel).unwrap_err();
        assert!(error.is::<Cancelled>());
        let so_far = [&prompt, &said[..]].concat();
        let reused = advance(&mut session, &mut engine, &(so_far, Vec::new())).reused;
        assert_eq!(reused, if undo_rows > 0 { prompt.len() + 4 } else { 0 });
        assert_eq!([said, reply(&mut session, &mut engine, 7)].concat(), whole);
    }
}

#[test]
fn sessions_stepped_together_are_as_alone() {
    let demo = Demo::new();
    let mut engine = demo.engine();
    let prompts = [0, 3, 5].map(|i| demo.tokenizer.encode(SAID[i], Specials::Text));
    let options = SessionOptions { context: 64, undo_rows: 4, ..Default::default() };
    let mut sessions = [(); 3].map(|()| Session::with_options(&engine, &options).unwrap());
    let vocab = engine.model().config.vocab;
    // Unequal pieces; what one conversation gives up, all redo.
    let mut together = vec![Vec::new(); 3];
    for (round, cut) in [(0, false), (1, true), (1, false), (2, false), (3, false)] {
        let piece = |i: usize| &prompts[i][round * (2 + i)..][..2 + i];
        let mut parts: Vec<_> = sessions
            .iter_mut()
            .enumerate()
            .map(|(i, session)| Part { session, ids: piece(i), want: Want::All })
            .collect();
        let stepped = step(&mut engine, &mut parts, &AtomicBool::new(cut));
        assert_eq!(stepped.is_err(), cut);
        let mut rows = stepped.unwrap_or_default().chunks(vocab);
        for (i, logits) in together.iter_mut().enumerate() {
            logits.extend(rows.by_ref().take(2 + i).flat_map(bits));
        }
    }
    for (i, session) in sessions.iter().enumerate() {
        let ids = session.tokens();
        assert_eq!(ids, &prompts[i][..4 * (2 + i)]);
        let mut alone = Session::new(&engine, ids.len());
        let cancel = AtomicBool::new(false);
        let mut logits = Vec::new();
        for id in ids.chunks(1) {
            logits.extend(bits(alone.extend(&mut engine, id, &cancel, |_| {}).unwrap()));
        }
        assert!(together[i] == logits, "session {i}");
    }
}

#[test]
fn a_checkpoint_that_cannot_be_kept_costs_time_only() {
    let demo = Demo::new();
    let mut engine = demo.engine();
    let options = SessionOptions {
        context: 100,
        checkpoints: 2,
        checkpoint_dir: Some(demo.dir.path().join("absent")),
        undo_rows: 0,
    };
    let mut session = Session::with_options(&engine, &options).unwrap();
    let prompt = (demo.tokenizer.encode(SAID[0], Specials::Text), Vec::new());
    advance(&mut session, &mut engine, &prompt);
    let problem = format!("{:#}", session.take_checkpoint_problem().unwrap());
    assert!(problem.contains("absent: cannot create a checkpoint"), "{problem}");
    assert!(session.take_checkpoint_problem().is_none());
    reply(&mut session, &mut engine, 3);
    assert_eq!(advance(&mut session, &mut engine, &prompt).reused, 0);
    assert_eq!(bits(session.logits()), fresh(&mut engine, &prompt.0));
}

#[test]
fn a_prompt_that_cannot_be_taken_in_leaves_the_session() {
    let demo = Demo::new();
    let mut engine = demo.engine();
    let mut session = Session::new(&engine, 8);
    let cancel = AtomicBool::new(false);
    let mut try_prompt = |session: &mut Session, ids: &[u32]| {
        let advanced = session.advance_to(&mut engine, ids, &[], &cancel, |_| {});
        advanced.map_err(|e| format!("{e:#}"))
    };
    try_prompt(&mut session, &[5, 6, 7]).unwrap();
    let logits = bits(session.logits());
    let wrong = [
        (&[][..], "the prompt has no tokens"),
        (&[5; 9], "the prompt has 9 tokens, which do not fit into a context of 8"),
        (&[5, 6, 7, 9999], "token id 9999 is not in the vocabulary of 2304"),
    ];
    for (ids, problem) in wrong {
        assert_eq!(try_prompt(&mut session, ids).unwrap_err(), problem);
        assert_eq!(session.tokens(), [5, 6, 7]);
    }
    let advance = try_prompt(&mut session, &[5, 6, 7]).unwrap();
    assert_eq!(advance, Advance { total: 3, reused: 3, done: 3, under_way: 0 });
    assert_eq!(bits(session.logits()), logits);
    let too_long = SessionOptions::plain(usize::MAX);
    assert!(Session::with_options(&engine, &too_long).is_err());
}

#[test]
fn no_byte_of_a_session_file_can_be_wrong() {
    let tiny = TinyK3::new(31);
    let out = tiny.path("container");
    convert(&tiny.snapshot(), &out, &Recipe::default());
    let container = Container::open(&out).unwrap();
    let mut engine = engine(&container, &[]);
    let path = tiny.path("saved");
    let mut session = Session::new(&engine, 8);
    advance(&mut session, &mut engine, &(vec![1, 2, 3], Vec::new()));
    session.save(&engine, &path, "{}").unwrap();
    let good = std::fs::read(&path).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);

    let mut session = Session::new(&engine, 8);
    advance(&mut session, &mut engine, &(vec![7, 8], Vec::new()));
    let logits = bits(session.logits());
    let mut refuse = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let error = session.load(&engine, &path).expect_err("a file that is wrong");
        assert_eq!(session.tokens(), [7, 8]);
        assert_eq!(bits(session.logits()), logits);
        error.to_string()
    };
    let step = good.len() / 300;
    for at in (0..296).chain((296..good.len()).step_by(step)).chain([good.len() - 1]) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        refuse(&bytes);
    }
    for len in (0..290).step_by(17).chain([good.len() - 1]) {
        refuse(&good[..len]);
    }
    refuse(&[&good[..], &[0]].concat());
    // Headers that agree with themselves and with nothing else.
    let mut forge = |at: usize, value: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        let digest = Digest::of(&bytes[..264]).to_bytes();
        bytes[264..296].copy_from_slice(&digest);
        let problem = refuse(&bytes);
        problem.split_once(": ").unwrap().1.to_owned()
    };
    let most = u64::MAX.to_le_bytes();
    assert_eq!(forge(8, &[2]), "expected session format 1, found 2");
    assert_eq!(forge(16, &[0; 32]), "the session was made with another container");
    assert_eq!(forge(12, &[1, 1]), "the session was made with --act8 on, this is --act8 off");
    let kv = "the session was made with --kv-type bf16, this is f32";
    assert_eq!(forge(14, &[1]), kv);
    assert_eq!(forge(14, &[2]), "latents of unknown kind 2");
    let problem = "the session was made with --top-p-experts 0.5, this is 1";
    assert_eq!(forge(96, &0.5f32.to_le_bytes()), problem);
    assert_eq!(forge(48, &[6]), "the session was made with 6 layers, these are 7");
    let problem = "tokens, which do not fit into a context of 8";
    assert_eq!(forge(56, &[9]), format!("the session has 9 {problem}"));
    assert_eq!(forge(56, &most), format!("the session has {} {problem}", u64::MAX));
    for count in [64, 72, 80, 88] {
        assert_eq!(forge(count, &most), "its sizes are not those of the model");
    }
    assert!(forge(64, &[3]).ends_with(&format!("bytes, found {}", good.len())));
    let mut ids = good[296..308].to_vec();
    ids[3] = 0x7f;
    assert_eq!(forge(296, &ids), "a section is not what its digest says");

    std::fs::write(&path, &good).unwrap();
    assert_eq!(session.load(&engine, &path).unwrap(), "{}");
    assert_eq!(session.tokens(), [1, 2, 3]);
    let missing = session.load(&engine, &tiny.path("none")).unwrap_err().to_string();
    assert!(missing.ends_with("none: no such file"), "{missing}");
}

/// Tokens of a reply that may be guessed: enough for the demo model to begin to loop.
const REPLY: usize = 24;

#[test]
fn guesses_never_change_a_reply() {
    let demo = Demo::new();
    let mut engine = demo.engine();
    let mut total = DraftStats::default();
    // 50 prompts, each greedily and then sampled.
    for number in 0..100 {
        let text = format!("{} {}", SAID[number / 2 % 10], SAID[number / 20]);
        let prompt = demo.tokenizer.encode(&text, Specials::Text);
        // A sampled reply: the choice depends on the logits and on the step.
        let mut tell = |guesses: usize| {
            let options = SessionOptions::conversation(100, 0, None, guesses);
            let mut session = Session::with_options(&engine, &options).unwrap();
            advance(&mut session, &mut engine, &(prompt.clone(), Vec::new()));
            let (mut drafter, mut said) = (Drafter::new(guesses), vec![best(session.logits())]);
            let mut noise = fastrand::Rng::with_seed(number as u64);
            while said.len() < REPLY {
                let last = said[said.len() - 1];
                let choose = |logits: &[f32]| {
                    let noisy = logits.iter().map(|l| match number % 2 {
                        0 => *l,
                        _ => l - 0.3 * noise.f32().ln().abs().ln(),
                    });
                    said.push(best(&noisy.collect::<Vec<_>>()));
                    Ok((said.len() < REPLY).then_some(said[said.len() - 1]))
                };
                let cancel = AtomicBool::new(false);
                decode(&mut session, &mut engine, last, &mut drafter, &cancel, choose).unwrap();
            }
            assert_eq!(session.tokens(), [&prompt, &said[..REPLY - 1]].concat());
            (said, drafter.stats())
        };
        let (plain, alone) = tell(0);
        assert_eq!((alone.steps, alone.guessed), (REPLY as u64 - 1, 0));
        for guesses in [6, 1].into_iter().take(1 + usize::from(number < 10)) {
            let (said, stats) = tell(guesses);
            assert_eq!(said, plain, "{guesses} guesses, prompt {number}");
            assert_eq!(stats.steps + stats.right, REPLY as u64 - 1);
            total.guessed += stats.guessed;
            total.right += stats.right;
        }
    }
    assert!(total.right > 50 && total.right < total.guessed, "{total:?}");
}
