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
    /// Run these lines. Their block begins with ```` ```sh ````.
    Commands(String),
}

/// The steps of a page, in order. All other blocks are only for reading.
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
        match (info, info.split_once(" file=")) {
            (_, Some((_, path))) => steps.push(Step::File { path: path.to_string(), text: block }),
            ("sh", None) => steps.push(Step::Commands(block)),
            _ => {}
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
                    ```rust\nlet only = \"to be read\";\n```\n";
        let file = |path: &str, text: &str| Step::File { path: path.into(), text: text.into() };
        let expected =
            [Step::Commands("cargo new x\ncd x\n".into()), file("src/lib.rs", "fn f() {\n}\n")];
        assert_eq!(steps(page), expected);
    }
}
