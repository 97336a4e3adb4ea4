//! Reads a documentation page that builds a crate: its code blocks are files and commands.

/// One thing that the page tells its reader to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Write this file. Its block begins with a line such as ```` ```rust file=src/lib.rs ````.
    File {
        /// The file's path, relative to the crate.
        path: String,
        /// The file's whole content.
        text: String,
    },
    /// Add to the end of this file. Its block begins with a line such as
    /// ```` ```toml append=Cargo.toml ````.
    Append {
        /// The file's path, relative to the crate.
        path: String,
        /// The text to add.
        text: String,
    },
    /// Run these lines. Their block begins with ```` ```sh ````.
    Commands(String),
}

/// The steps of a page, in order. All other blocks are only for reading. A Markdown parser would not
/// help: the words after a block's language are ours, and blocks begin at the start of a line.
pub fn steps(page: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(info) = line.strip_prefix("```") else { continue };
        let block: String = lines
            .by_ref()
            .take_while(|line| *line != "```")
            .map(|line| format!("{line}\n"))
            .collect();
        if let Some((_, path)) = info.split_once(" file=") {
            steps.push(Step::File { path: path.to_string(), text: block });
        } else if let Some((_, path)) = info.split_once(" append=") {
            steps.push(Step::Append { path: path.to_string(), text: block });
        } else if info == "sh" {
            steps.push(Step::Commands(block));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_commands_in_order() {
        let page = "# A\n\n```sh\ncargo new x\ncd x\n```\n\ntext\n\n```rust file=src/lib.rs\nfn f() {\n}\n```\n\n\
                    ```toml append=Cargo.toml\n[[bench]]\n```\n\n\
                    ```rust\nlet only = \"to be read\";\n```\n";
        let expected = [
            Step::Commands("cargo new x\ncd x\n".into()),
            Step::File { path: "src/lib.rs".into(), text: "fn f() {\n}\n".into() },
            Step::Append { path: "Cargo.toml".into(), text: "[[bench]]\n".into() },
        ];
        assert_eq!(steps(page), expected);
    }
}
