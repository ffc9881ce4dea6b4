//! `/stats`.

use super::Repl;

impl Repl<'_> {
    /// What the chat has done so far, line by line.
    pub(super) fn stats(&self) -> String {
        let (counts, drafts) = (self.session.counts(), self.drafter.stats());
        let experts = self.engine.experts().stats();
        let asked = (experts.hits + experts.misses).max(1);
        let checkpoints: Vec<_> = self.session.checkpoints().map(|p| p.to_string()).collect();
        let checkpoints =
            if checkpoints.is_empty() { "none".into() } else { checkpoints.join(", ") };
        let mut lines = vec![
            format!(
                "context      {} of {} tokens",
                self.session.tokens().len(),
                self.session.context()
            ),
            format!(
                "conversation {} turns, {}",
                self.conversation.turns(),
                self.conversation.mode()
            ),
            format!(
                "tokens       {} computed, {} of prompts known before",
                counts.computed, counts.reused
            ),
            format!("checkpoints  {checkpoints}; gone back to {} times", counts.restored),
            format!(
                "experts      {:.1} % of {asked} from the cache, {:.2} GB read, waited {:.1} s",
                experts.hits as f64 * 100.0 / asked as f64,
                experts.bytes_read as f64 / 1e9,
                experts.waited.as_secs_f64()
            ),
            format!("dense        {:.2} GB read", self.engine.dense().bytes_read() as f64 / 1e9),
        ];
        if drafts.guessed > 0 {
            lines.push(format!(
                "guesses      {} of {} right, in {} steps",
                drafts.right, drafts.guessed, drafts.steps
            ));
        }
        lines.join("\n")
    }
}
