//! Documents that do not see one another: where they begin, and what is learned of them.

use super::*;
use crate::data::{HeldOut, IGNORED, windows};
use crate::files::Whole;
use crate::model::{Model, ModelConfig};
use crate::options::Size;
use std::rc::Rc;
use tch::{Device, Reduction};

const END: u32 = 0;
const CONTEXT: usize = 8;

/// Tokens, the last quarter of which is held out, in documents of up to 12. Every seventh is not learned.
fn tokens(count: usize) -> (tempfile::TempDir, Rc<Tokens>) {
    let folder = tempfile::tempdir().unwrap();
    let (mut left, mut all) = (0, Vec::new());
    for place in 0..count as u64 {
        let drawn = crate::data::mix(place);
        all.push(if left == 0 { END } else { 1 + (drawn % 9) as u32 });
        left = if left == 0 { drawn % 12 } else { left - 1 };
    }
    crate::tokens::write(folder.path(), ([7; 32], 300), 0.25, true, |writer| {
        all.chunks(7).try_for_each(|some| {
            writer.write_unlearned(&some[..1])?;
            writer.write(&some[1..])
        })
    })
    .and_then(Whole::put)
    .unwrap();
    let tokens = Rc::new(Tokens::open(folder.path()).unwrap());
    (folder, tokens)
}

/// The inputs, the targets and the borders of a window.
fn window(tokens: &Tokens, part: Part, start: usize, apart: Apart) -> [Vec<i64>; 3] {
    let all = windows(tokens, part, &[start], CONTEXT, Some(apart)).unwrap();
    let all = Vec::<i64>::try_from(all).unwrap();
    let (inputs, rest) = all.split_at(CONTEXT);
    let (targets, borders) = rest.split_at(CONTEXT);
    [inputs, targets, borders].map(<[i64]>::to_vec)
}

#[test]
fn no_window_exceeds_what_the_scan_has_found() {
    // More than are read at once.
    let (_folder, tokens) = tokens(100_000);
    let apart = Apart::scan(&tokens, END.into(), CONTEXT as i64);
    let (mut borders, mut longest) = (0, 0);
    for part in [Part::Train, Part::HeldOut] {
        for start in 0..tokens.len(part) - CONTEXT {
            let [inputs, targets, found] = window(&tokens, part, start, apart);
            let ends = (1..CONTEXT).filter(|&place| inputs[place - 1] == 0);
            let mut begins: Vec<i64> = ends.map(|place| place as i64).collect();
            borders = borders.max(begins.len());
            let all = [&[0], &begins[..], &[CONTEXT as i64]].concat();
            longest = longest.max(all.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap());
            begins.resize(apart.borders, CONTEXT as i64);
            assert_eq!(found, begins);
            for (input, target) in inputs.iter().zip(&targets) {
                assert!(*input != 0 || *target == IGNORED, "a document learns the next one");
            }
        }
    }
    assert_eq!((borders, longest), (apart.borders, apart.longest));
    let learned = (0..tokens.len(Part::Train) - 1).filter(|&start| {
        let mut pair = [0; 2];
        tokens.read(Part::Train, start, &mut pair);
        pair[1] >= 0 && pair[0].max(!pair[0]) != 0
    });
    assert_eq!(learned.count(), apart.learned);
}

/// A lone end of text is no token's target, and no token is learned from it.
#[test]
fn documents_of_one_token_teach_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let of = |tokens: &[u32]| {
        let write = |writer: &mut crate::tokens::Writer| writer.write(tokens);
        let file = crate::tokens::write(folder.path(), ([7; 32], 300), 0.25, false, write);
        file.and_then(Whole::put).unwrap();
        let tokens = Rc::new(Tokens::open(folder.path()).unwrap());
        (Apart::scan(&tokens, END.into(), CONTEXT as i64), tokens)
    };
    let (apart, tokens) = of(&[END; 100]);
    assert_eq!((apart.learned, apart.borders, apart.longest), (0, CONTEXT - 1, 1));
    let held_out = HeldOut::new(tokens, 2, CONTEXT as i64, 3, Some(apart));
    let error = held_out.err().unwrap().to_string();
    assert!(error.contains("--eval-windows") && error.contains("--held-out"), "{error}");
    // Among others, they change nothing: here a second token and an end are learned of each four.
    let (apart, tokens) = of(&[5, 6, END, END].repeat(25));
    assert_eq!(apart.learned_share(), 38.0 / 75.0);
    let [_, targets, _] = window(&tokens, Part::Train, 0, apart);
    let end = i64::from(END);
    assert_eq!(targets, [6, end, IGNORED, IGNORED, 6, end, IGNORED, IGNORED]);
}

#[test]
fn data_without_documents_are_one() {
    let (_folder, tokens) = tokens(100);
    let apart = Apart::scan(&tokens, 299, CONTEXT as i64);
    assert_eq!((apart.borders, apart.longest), (0, CONTEXT as i64));
    // A batch has a number of borders in any case, which says that documents are apart.
    assert_eq!(window(&tokens, Part::Train, 3, apart)[2], [CONTEXT as i64]);
}

/// Layers may be computed again.
fn models() -> impl Iterator<Item = ModelConfig> {
    [Size::Mini, Size::LlamaMini].into_iter().flat_map(|size| {
        [false, true].map(|recompute_layers| ModelConfig {
            context: CONTEXT as i64,
            layers: 2,
            recompute_layers,
            ..size.model(300)
        })
    })
}

/// The loss of a window, and its gradients, are the sums of those of its documents.
#[test]
fn a_window_learns_what_its_documents_learn_alone() {
    let (_folder, tokens) = tokens(400);
    let apart = Apart::scan(&tokens, END.into(), CONTEXT as i64);
    for config in models() {
        let of = |batches: &[(Vec<Tensor>, Option<Apart>)]| {
            let model = Model::new(&config, Device::Cpu, 3).unwrap();
            let loss = |(batch, apart): &(Vec<Tensor>, Option<Apart>)| {
                model.loss(batch, *apart, true, Reduction::Sum).unwrap()
            };
            let sum = batches.iter().map(loss).reduce(|a, b| a + b).unwrap();
            sum.backward();
            let gradients = model.named_variables().into_iter().map(|(_, weight)| weight.grad());
            std::iter::once(sum.detach()).chain(gradients).collect::<Vec<_>>()
        };
        let starts = [3, 40, 71, 160];
        let rows = starts.len() as i64;
        let all = windows(&tokens, Part::Train, &starts, CONTEXT, Some(apart)).unwrap();
        let count = rows * CONTEXT as i64;
        let part = |at| all.narrow(0, at, count).view([rows, -1]);
        let (inputs, targets) = (part(0), part(count));
        let borders = all.narrow(0, 2 * count, all.numel() as i64 - 2 * count);
        let mut alone = Vec::new();
        for row in 0..rows {
            let places = Vec::<i64>::try_from(inputs.get(row)).unwrap();
            let mut first = 0;
            for (place, token) in places.iter().enumerate() {
                if *token == 0 || place + 1 == CONTEXT {
                    let of = |x: &Tensor| x.narrow(0, row, 1).slice(1, first, place as i64 + 1, 1);
                    alone.push((vec![of(&inputs), of(&targets)], None));
                    first = place as i64 + 1;
                }
            }
        }
        assert!(alone.len() as i64 > rows + 3, "{} documents", alone.len());
        let batch = vec![inputs, targets, borders];
        let together = vec![batch[0].shallow_clone(), batch[1].shallow_clone()];
        let (found, expected) = (of(&[(batch, Some(apart))]), of(&alone));
        for (found, expected) in found.iter().zip(&expected) {
            let worst = (found - expected).abs().max().double_value(&[]);
            assert!(found.allclose(expected, 1e-4, 1e-5, false), "{worst:e} apart");
        }
        let together = of(&[(together, None)]).remove(0);
        assert!(!found[0].allclose(&together, 1e-4, 1e-5, false), "they saw one another");
    }
}

#[test]
fn a_vocabulary_without_an_end_is_refused() {
    let (_folder, tokens) = tokens(100);
    let of = |documents| Apart::of(documents, &tokens, &Tokenizer::bytes(), 8);
    assert_eq!(of(Documents::Together).unwrap(), None);
    let error = of(Documents::Apart).unwrap_err().to_string();
    assert!(
        error.contains("--documents apart needs") && error.contains("--vocabulary bpe"),
        "{error}"
    );
}
