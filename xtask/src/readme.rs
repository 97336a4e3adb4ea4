//! Checks the links of the packages' READMEs. A package index and docs.rs show a README without the
//! rest of the repository, so that only absolute links lead anywhere.

use crate::repo::Repo;

/// The READMEs of the packages that are published, relative to the repository.
const READMES: [&str; 2] = ["README.md", "tch-extension-build/README.md"];

/// How links to files of this repository begin.
const OWN: [&str; 3] = [
    "https://github.com/tch-extension/tch-extension/blob/main/",
    "https://github.com/tch-extension/tch-extension/tree/main/",
    "https://raw.githubusercontent.com/tch-extension/tch-extension/main/",
];

/// The targets of a page's links and pictures, in Markdown and in HTML, without those in code.
fn targets(page: &str) -> Vec<String> {
    let mut is_code = false;
    let mut text = String::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            text += &without_code_spans(line);
            text.push('\n');
        }
    }
    let mut targets = Vec::new();
    for (start, end) in [("](", ')'), ("src=\"", '"'), ("href=\"", '"'), ("\n[", '\n')] {
        for found in text.split(start).skip(1) {
            let found = found.split(end).next().unwrap_or_default();
            // `[name]: target` defines a link; any other line may begin with a bracket, too.
            let target = match start {
                "\n[" => found.split_once("]:").map(|(_, target)| target),
                _ => Some(found),
            };
            targets.extend(target.map(|target| target.trim().to_string()));
        }
    }
    targets
}

fn without_code_spans(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// What is wrong with a link, if anything.
fn mistake(target: &str, exists: impl Fn(&str) -> bool) -> Option<&'static str> {
    if !target.starts_with("https://") {
        return Some("is not absolute; begin it with https://");
    }
    let path = OWN.iter().find_map(|own| target.strip_prefix(own))?;
    let path = path.split('#').next().unwrap_or_default();
    (!exists(path)).then_some("leads to a file that this repository does not have")
}

/// The anchors of a page's headings, as docs.rs and the package index name them.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        words.replace(|letter: char| !letter.is_alphanumeric() && !"-_".contains(letter), "")
    };
    headings.map(|heading| format!("#{}", anchor(heading))).collect()
}

#[test]
fn links_of_the_readmes_are_absolute() {
    let root = Repo::find().unwrap().root;
    for readme in READMES {
        let page = std::fs::read_to_string(root.join(readme)).unwrap();
        let targets = targets(&page);
        assert!(!targets.is_empty(), "{readme}: the search finds no link at all");
        for target in targets {
            if target.starts_with('#') {
                assert!(anchors(&page).contains(&target), "{readme}: no heading for {target}");
                continue;
            }
            let mistake = mistake(&target, |path| root.join(path).exists());
            assert_eq!(mistake, None, "{readme}: {target}");
        }
    }
}

#[test]
fn links_are_found_outside_of_code() {
    let page = "[a](b.md), ![c](d.svg)\n\n[e]: f.md\n[g] is no link\n<img src=\"h.png\">\n\
                ```rust\nlet x = y[0](z);\n```\n`#[x](y)` is code\n";
    assert_eq!(targets(page), ["b.md", "d.svg", "h.png", "f.md"]);
}

#[test]
fn headings_have_anchors() {
    assert_eq!(anchors("# A\n\n### Which b?\ntext # c\n"), ["#a", "#which-b"]);
}

#[test]
fn a_relative_link_or_a_missing_file_is_a_mistake() {
    let exists = |path: &str| path == "docs/a.md";
    assert!(mistake("docs/a.md", exists).unwrap().contains("absolute"));
    assert!(mistake("http://docs.rs/tch", exists).unwrap().contains("absolute"));
    assert_eq!(mistake("https://docs.rs/tch", exists), None);
    assert_eq!(mistake(&format!("{}docs/a.md#part", OWN[0]), exists), None);
    assert!(mistake(&format!("{}docs/b.svg", OWN[2]), exists).unwrap().contains("not have"));
}
