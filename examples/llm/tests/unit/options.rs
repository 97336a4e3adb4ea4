use super::*;
use clap::Parser;

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    options: TrainOptions,
}

fn options(line: &str) -> TrainOptions {
    Program::parse_from(format!("llm {line}").split_whitespace()).options
}

fn data() -> DataId {
    DataId { vocabulary: "ab".into(), tokens: 1000, checksum: 7, learned: None }
}

fn settings(line: &str, earlier: Option<&Settings>) -> Result<Settings> {
    options(line).settings(Device::Cpu, 256, data(), earlier, None)
}

#[test]
fn sizes_are_gpt_2_s() {
    let parameters = |size: Size| size.model(50257).parameters();
    // GPT-2 has 124 439 808, and here 47 rows of padding more.
    assert_eq!(parameters(Size::M124), 124_439_808 + 47 * 768);
    assert_eq!(Size::M124.model(50257).vocabulary, 50304);
    assert_eq!(parameters(Size::M350), 354_823_168 + 47 * 1024);
}

#[test]
fn what_is_given_replaces_the_size_s() {
    let found = settings("--size char --layers 2 --lr 0.5 --steps 50", None).unwrap();
    assert_eq!((found.model.layers, found.model.dim, found.lr), (2, 384, 0.5));
    assert_eq!(found.warm_up, 5);
    assert!(settings("--batch 0", None).unwrap_err().to_string().contains("--batch 0"));
}

#[test]
fn a_continued_run_keeps_its_settings() {
    let earlier = settings("--layers 2 --lr 0.5", None).unwrap();
    assert_eq!(settings("", Some(&earlier)).unwrap(), earlier);
    assert_eq!(settings("--lr 0.5", Some(&earlier)).unwrap(), earlier);
    let refused = |line| settings(line, Some(&earlier)).unwrap_err().to_string();
    assert!(refused("--lr 0.25").contains("--lr of the run in runs/llm was 0.5"));
    assert!(refused("--size char").contains("--context"));
    for (line, expected) in [
        ("--optimizer muon", "--optimizer of the run in runs/llm was adamw, and is muon now"),
        ("--lora 2", "--lora of the run in runs/llm was not given, and is 2 now"),
        ("--vocabulary-from x", "--vocabulary-from of the run in runs/llm was not given"),
        ("--size llama-mini --layers 2", "the architecture of the run in runs/llm was another one"),
    ] {
        let error = refused(line);
        assert!(error.starts_with(expected) && !error.contains("null"), "{error}");
    }
    let other = DataId { tokens: 999, learned: Some(5), ..data() };
    let error = options("").settings(Device::Cpu, 256, other, Some(&earlier), None).unwrap_err();
    let expected = "the data of the run in runs/llm were others: give those with --data";
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[test]
fn impossible_numbers_are_refused() {
    for line in [
        "--eval-every 0",
        "--log-every -1",
        "--sample -1",
        "--peak 0",
        "--top-k 0",
        "--bucket-mb -3",
    ] {
        let option = line.split(' ').next().unwrap();
        let line = line.replacen(' ', "=", 1);
        let error = options(&line).check(Device::Cpu).unwrap_err().to_string();
        assert!(error.starts_with(option), "{error}");
    }
}

#[test]
fn sizes_are_checked_with_those_that_they_are_used_with() {
    // 128 features of `mini`, 384 of `char`, and those of a checkpoint.
    let check = |line, device| options(line).check(device);
    assert!(check("--heads 3", Device::Cpu).is_err());
    assert!(check("--heads 3", Device::Cuda(0)).is_ok());
    assert!(check("--heads 5", Device::Cuda(0)).is_err());
    assert!(check("--heads 3 --resume", Device::Cpu).is_ok());
    assert!(check("--heads 3 --init x", Device::Cpu).is_ok());
}

#[test]
fn a_continued_run_keeps_its_text() {
    let earlier = settings("--text a.txt b.txt --vocabulary bpe", None).unwrap();
    for same in ["", "--text a.txt b.txt", "--vocabulary-size 8192", "--held-out 0.1"] {
        assert_eq!(settings(same, Some(&earlier)).unwrap(), earlier, "{same}");
    }
    for other in ["--text a.txt", "--vocabulary bytes", "--held-out 0.2", "--vocabulary-from x"] {
        let error = settings(other, Some(&earlier)).unwrap_err().to_string();
        let option = other.split(' ').next().unwrap();
        assert!(error.starts_with(&format!("{option} of the run in runs/llm was")), "{error}");
    }
}
