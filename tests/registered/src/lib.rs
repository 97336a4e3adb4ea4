//! Operators in Rust for Python.

use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::library::{self, Operator, SymInt, empty, new_empty, sizes};
use tch_extension::view::{view, view_mut};
use tch_extension::{Error, Result, args};

#[path = "../../support/unit_rows.rs"]
mod unit_rows;

tch_extension::register! { namespace registered; unit_rows::UnitRows }

tch_extension::operators! {
    namespace registered;

    /// a * b + c, by a loop over memory.
    fn muladd(a: &Tensor, b: &Tensor, c: f64 = 1.0) -> Tensor {
        cpu = muladd,
        fake = |a, _b, _c| new_empty(a, &sizes(a)),
        autograd = muladd_autograd,
    }

    fn muladd_backward(grad: &Tensor, a: &Tensor, b: &Tensor) -> (Tensor, Tensor) {
        cpu = |grad, a, b| Ok(((grad * b).contiguous(), (grad * a).contiguous())),
        fake = |_grad, a, b| Ok((new_empty(a, &sizes(a))?, new_empty(b, &sizes(b))?)),
    }

    /// The same by a backward that the macro makes a node of.
    fn product(a: &Tensor, b: &Tensor, scale: f64 = 2.0) -> Tensor {
        cpu, cuda = |a, b, scale| Ok(a * b * scale),
        fake = |a, _b, _scale| new_empty(a, &sizes(a)),
        backward = |ctx, grads| {
            let (a, b, scale): (_, _, f64) = (ctx.saved(0)?, ctx.saved(1)?, ctx.argument("scale")?);
            let grad = grads.get(0)? * scale;
            Ok([&grad * b, &grad * a].into())
        },
        save = [a, b],
        double_backward = true,
    }

    fn exp(x: &Tensor) -> (Tensor, Tensor) {
        cpu = |x| Ok((x.exp(), x.sign())),
        fake = |x| Ok((new_empty(x, &sizes(x))?, new_empty(x, &sizes(x))?)),
        backward = |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
        save = [result.0],
    }

    /// The sum of all tensors.
    fn sum_all(tensors: &[Tensor], last: Option<&Tensor> = None) -> Tensor {
        cpu = |tensors, last| Ok(tensors.iter().chain(last).fold(Tensor::from(0_f32), |sum, x| sum + x)),
        fake = |tensors, _last| new_empty(&tensors[0], &sizes(&tensors[0])),
        backward = |_ctx, grads| {
            let grad = grads.get(0)?;
            Ok([Some(grad.shallow_clone()), Some(grad.shallow_clone()), None].into())
        },
        save = [],
    }

    fn scale_(x: &mut Tensor, by: f64) {
        cpu = |x, by| {
            let _ = x.g_mul_scalar_(by);
            Ok(())
        },
        fake = |_x, _by| Ok(()),
        backward = |ctx, grads| Ok((grads.get(0)? * ctx.argument::<f64>("by")?).into()),
        save = [],
    }

    fn square(x: &Tensor) -> Tensor {
        composite = |x| Ok(x * x),
    }

    /// The matrix in rows of `columns`, doubled, and a line of zeros: its sizes are arithmetic.
    fn rows(x: &Tensor, columns: SymInt, kind: Option<Kind> = None) -> Tensor {
        cpu = |x, columns, kind| {
            let kind = kind.unwrap_or(x.kind());
            let rows = (x.reshape([-1, columns]) * 2.0).to_kind(kind);
            Ok(Tensor::cat(&[rows, Tensor::zeros([1, columns], (kind, x.device()))], 0))
        },
        fake = |x, columns, kind| {
            let elements = sizes(x).into_iter().fold(SymInt::from(1), |product, size| product * size);
            empty(&[elements / &columns + 1, columns], kind.unwrap_or(x.kind()), x)
        },
    }

    fn every_type(
        tensors: &[Tensor],
        maybe: &[Option<Tensor>],
        one: Option<&Tensor>,
        ints: &[i64] = &[1, -2],
        owned: Vec<i64> = &[3],
        sizes: &[SymInt] = &[4],
        floats: &[f64] = &[0.5, 1e-30],
        bools: &[bool] = &[true, false],
        int: i64 = -7,
        flag: bool = true,
        text: &str = "a \"quoted\" \\ text",
        eps: Option<f64> = None,
        some: Option<i64> = Some(3),
        size: Option<SymInt> = None,
        device: Option<Device> = None,
    ) -> (Tensor, Vec<Tensor>, Option<Tensor>, i64, f64, bool) {
        cpu = |tensors, maybe, one, ints, owned, sizes, floats, bools, int, flag, text, eps, some, size, device| {
            let line = format!(
                "{} {} {} {ints:?} {owned:?} {sizes:?} {floats:?} {bools:?} {int} {flag} {text} {eps:?} {some:?} {size:?} {device:?}",
                tensors.len(),
                maybe.iter().flatten().count(),
                one.is_some(),
            );
            println!("{line}");
            let first = tensors[0].shallow_clone();
            Ok((first + 1, tensors.iter().map(|x| x * 2).collect(), one.map(|one| one * 3), int, eps.unwrap_or(0.5), flag))
        },
    }

    fn traced(x: &Tensor) -> bool {
        composite = |x| Ok(library::is_traced(&[x])),
    }

    /// Its fake is wrong on purpose.
    fn wrong_fake(x: &Tensor) -> Tensor {
        cpu = |x| Ok(x * 2),
        fake = |x| new_empty(x, &[sizes(x)[0].clone() + 1]),
    }

    fn fails(how: i64) -> Tensor {
        composite = |how| match how {
            0 => Err(Error::msg("it is meant to fail")),
            1 => panic!("it is meant to panic"),
            _ => Ok(Tensor::zeros([1], (Kind::Float, Device::Cpu)).f_reshape([2, 2])?),
        },
    }
}

fn muladd(a: &Tensor, b: &Tensor, c: f64) -> Result<Tensor> {
    if a.size() != b.size() || a.kind() != Kind::Float || b.kind() != Kind::Float {
        return Err(Error::argument(
            "muladd",
            "b",
            format!("{:?}", a.size()),
            format!("{:?}", b.size()),
            "",
        ));
    }
    let (a, b) = (a.contiguous(), b.contiguous());
    let y = a.empty_like();
    let (flat_a, flat_b, mut flat_y) = (a.view(-1), b.view(-1), y.view(-1));
    {
        let (a, b) = (view::<f32, 1>(&flat_a)?, view::<f32, 1>(&flat_b)?);
        let mut y = view_mut::<f32, 1>(&mut flat_y)?;
        for (i, (a, b)) in a.iter().zip(b.iter()).enumerate() {
            y.set([i], a * b + c as f32);
        }
    }
    Ok(y)
}

struct MulAdd {
    c: f64,
}

impl Function for MulAdd {
    const NAME: &'static str = "muladd";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (a, b) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(a);
        saver.save(b);
        let muladd = Operator::find("registered::muladd")?;
        let y: Tensor = library::below_autograd(|| muladd.call(args![a, b, self.c]))?;
        Ok(y.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let backward = Operator::find("registered::muladd_backward")?.no_grad();
        let (a, b): (Tensor, Tensor) =
            backward.call(args![grads.get(0)?, &ctx.saved(0)?, &ctx.saved(1)?])?;
        Ok([a, b].into())
    }
}

fn muladd_autograd(a: &Tensor, b: &Tensor, c: f64) -> Result<Tensor> {
    apply(MulAdd { c }, &[Some(a), Some(b)])?.single()
}
